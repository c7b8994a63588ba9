"""What the compared methods share: their flags, opening a run, the training loop, the last lines. Not run by itself.

A method is a script beside this file, run from the repository's folder:

    python -m baselines.usnid --dataset clinc --gamma 10 --seed 0 --encoder minilm

Reads   data/<run>/                  (make_lt_data.py)
        out/<run>/pretrain.pt        (pretrain.py's CE + MLM) where the method starts from it; made if it is missing
Writes  out/<run>_<method>/          last.pt  log.jsonl  results.json  pseudo_label.npy  confidence.npy  beta.npy
                                     train_feature.npy  test_feature.npy  test_pred.npy, as train_imbanid.py does, and
                                     pretrain.pt where the method has a pre-training of its own (in last.pt's format,
                                     not in that of out/<run>/); kmeans.py, which does not train, leaves out the first two

All methods have the same encoder of which the last layer trains, the same splits, and K, the number of classes, given. A
method ends with centres fitted on the training rows; a test row gets the nearest one (protocol C), and k-means on the test
features is reported beside it (protocol T).
"""
import json
import math
import os
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from tqdm import tqdm

import pretrain
import train_imbanid
from encoder import Encoder, pick_dtype
from losses import class_wise_loss, contrastive_objective, instance_wise_loss
from make_lt_data import CORPORA, UserError, check_positive, check_tag, open_run, write_atomic
from pretrain import (
    check_weights,
    commit,
    in_other_type,
    load_trained,
    load_trained_layers,
    open_checkpoint,
    rates_and_advice,
    save_checkpoint,
    seed_epoch,
    trained_state,
)
from seeding import kmeans, kmeans_rows, nearest, seed_centres, semi_supervised_kmeans
from train_imbanid import print_scores, read_finished, save_run, score, seeding_settings


@dataclass
class Flags:
    dataset: str = "clinc"  # as given to make_lt_data.py
    gamma: float = 10.0  # as given to make_lt_data.py
    seed: int = 0  # as given to make_lt_data.py; also draws batches, augmentations and dropout
    known_ratio: float = 0.75  # as given to make_lt_data.py
    labeled_ratio: float = 0.1  # as given to make_lt_data.py
    data_dir: str = "data"  # where make_lt_data.py wrote
    out_dir: str = "out"  # results go to out/<run>_<method>/
    tag: str = ""  # behind the method's name in that folder's name
    encoder: str = "bert-base-uncased"  # as for pretrain.py: minilm, a local folder, or a hub name
    trained_layers: int = 1  # as for pretrain.py
    max_length: int = 128  # tokens a text is cut at
    cache_gb: float = 8.0  # on a CPU, hidden states of more GB than this, per copy of the corpus, are mapped from a file
    device: str = "auto"  # cpu, cuda, or auto: cuda where there is one
    dtype: str = "auto"  # float32, bfloat16, or auto: bfloat16 where the hardware multiplies it natively
    restart: bool = False  # replace an earlier run that had other settings


class Run:
    """One open run of a method: what it may read (no train_truth), the encoder, and where it writes."""

    def __init__(self, args, method, pretrained=False):
        """pretrained: start from out/<run>/pretrain.pt instead of the encoder as it comes. Raises UserError."""
        if args.dataset not in CORPORA:
            raise UserError(f"--dataset {args.dataset}: the compared methods run on {', '.join(CORPORA)} only")
        check_tag(args)
        check_positive(args, "cache_gb")
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise UserError("the compared methods run on one process: python, not torchrun")
        self.args, self.method, self.views, self.log, self.epochs, self.kept = args, method, {}, [], {}, {}
        name, self.data, texts, self.labels, self.meta = open_run(args)
        self.K, self.num_known = self.meta["num_classes"], self.meta["num_known"]
        base = Path(args.out_dir) / name
        self.out = base.with_name("_".join(filter(None, (name, method, args.tag))))
        self.pre = pre_trained(args, base / "pretrain.pt", self.data) if pretrained else None
        self.seconds = {"pretrain": self.pre["seconds"]} if pretrained else {}
        self.device = pretrain.pick_device(args.device)
        dtype = pick_dtype(args.dtype, self.device)
        self.config = pretrain.settings(args, dtype) | {"method": method, "data": pretrain.data_fingerprint(self.data),
                                                        "pretrain": self.pre["config"] if pretrained else None}
        results = read_finished(self.out, self.config, args)
        self.finished = results is not None
        if self.finished:
            print_results(results, self.out)
            return
        self.lock = pretrain.locked(self.out)  # as long as this object lives
        if not self.lock.__enter__():
            raise UserError(f"another run is writing to {self.out}/: wait until it has ended, or pass another --tag")
        start, self.code = time.monotonic(), commit()
        torch.manual_seed(args.seed)  # a language-model head that the encoder comes without
        self.encoder = Encoder(args.encoder, args.max_length, self.device, dtype, True, args.cache_gb, self.out,
                               args.trained_layers)
        self.tokens = {split: self.encoder.tokenize(texts[split]) for split in texts}
        self.hidden = {split: self.encoder.cache(tokens, f"reading {split}") for split, tokens in self.tokens.items()}
        self.label = {split: torch.from_numpy(self.labels[split]).to(self.device) for split in ("train", "dev")}
        self.labelled = torch.where(self.label["train"] >= 0)[0]
        self.raw = {split: self.unit_features(split) for split in ("train", "test")}  # of the encoder as it comes
        torch.manual_seed(args.seed)  # the heads that a method makes
        if pretrained:
            load_trained_layers(self.encoder, self.pre)
            self.epochs["pretrain"], self.kept["pretrain"] = len(self.pre["log"]), self.pre["epoch"]
        self.seconds["features"] = time.monotonic() - start
        (self.out / "results.json").unlink(missing_ok=True)  # what --restart replaces

    def draw_labelled(self, most):
        """int64: at most `most` labelled training rows; none of them twice, it would be a positive of itself."""
        return self.labelled[torch.randperm(len(self.labelled))[:most].to(self.device)]

    @torch.no_grad()
    def unit_features(self, split="train", dense=None):
        """(n, H) unit features of a split, behind the dense layer if there is one; without gradients and without dropout."""
        z = self.encoder.all_features(self.hidden[split])
        return normalize(z if dense is None else dense(z), dim=1)

    def view(self, epoch, augment, rate, every=1, copy=0):
        """Hidden states of the training rows after augment(tokens, rate, generator), an augmentation of the tokens.

        The trunk has to run for each drawing, so `every` epochs share one. copy tells the drawings of one epoch apart.
        """
        wanted = (epoch - 1) // every
        if self.views.get(copy, (None,))[0] != wanted:
            generator = torch.Generator().manual_seed(7919 * (wanted + 1) + 104729 * self.args.seed + 15485863 * copy)
            self.views.pop(copy, None)  # frees the old view before the new one is made
            changed, before = augment(self.tokens["train"], rate, generator), (self.tokens["train"], self.hidden["train"])
            self.views[copy] = wanted, self.encoder.cache(changed, before=before)
        return self.views[copy][1]


def pre_trained(args, path, data):
    """The checkpoint of pretrain.py, the paper's CE + MLM: of this run if there is one, else made now."""
    if not path.exists():
        pretrain.main(pretrain.Args(**{f.name: getattr(args, f.name) for f in fields(Flags) if f.name != "tag"}))
    pre = pretrain.open_pretrained(path, data)
    for flag in ("encoder", "max_length", "trained_layers"):
        made_with = pre["config"][flag]
        if made_with != getattr(args, flag):
            raise UserError(f"{path} was made with --{flag} {made_with}: pass that, or another --out_dir")
    return pre


# ---- pieces that more than one method has ----

def supervised_contrast(z, label, tau):
    """SupCon (Khosla et al. 2020), mean over anchors: positives are the other views of the row and all views of rows with its
    label. z: (B, V, H) unit length, V = 2. label: (B,), -1 for a row without one."""
    one = torch.ones(len(z), device=z.device)
    cwcl, num_positive = class_wise_loss(z, label, one, label >= 0, tau, adaptive_weight=False)
    return contrastive_objective(cwcl, instance_wise_loss(z, tau), num_positive).mean()


def dense_layer(run, activation=nn.Tanh):
    """tanh(W z + b) with dropout, the layer that TEXTOIR's methods put between pooling and everything else.

    It starts as W = 1: a random one, which a few hundred labelled rows cannot mend, would undo what a sentence encoder knows.
    """
    layer = nn.Linear(run.encoder.hidden_size, run.encoder.hidden_size)
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(layer, activation(), nn.Dropout(0.1)).to(run.device)


def pretrain_on_known(run, dense, classifier):
    """Cross-entropy on the labelled rows; the epoch with the least loss on dev, which holds known classes only, is kept.

    By --pretrain_epochs, --batch_size, --lr and --patience of the method.
    """
    args = run.args

    def batch_loss(rows, memory):
        return cross_entropy(classifier(dense(run.encoder.features(run.hidden["train"], rows))), run.label["train"][rows])

    train(run, "pretrain", {"dense": dense, "classifier": classifier}, batch_loss, epochs=args.pretrain_epochs,
          batch_size=args.batch_size, lr=args.lr, rows=run.labelled, judge=dev_judge(run, dense, classifier),
          patience=args.patience)


def dev_judge(run, dense, classifier):
    """What early stopping looks at, the lower the better: cross-entropy on dev. None without dev rows of two classes."""
    @torch.no_grad()
    def judge(memory):
        return float(cross_entropy(classifier(dense(run.encoder.all_features(run.hidden["dev"]))), run.label["dev"]))
    return judge if len(run.labels["dev"]) and run.num_known > 1 else None


def align(reference, centre):
    """int64 (n,): for each of n reference centres the centre (K, H) matched to it, one-to-one with the least total distance."""
    distance = torch.cdist(reference.float(), centre.float()).cpu().numpy()
    return torch.from_numpy(linear_sum_assignment(distance)[1]).to(centre.device)


# ---- the training loop ----

def lr_share(step, total, bias_correction):
    """What AdamW's learning rate is multiplied by at step 0, 1, ..: linear warm-up over a tenth of the total, linear decay.

    Without bias_correction also by what turns AdamW's step into that of BertAdam and of AdamW(correct_bias=False), where the
    gradients are not as small as eps; it is 3.2 at first, 6.5 after ten steps and 1.3 after a thousand.
    """
    share = min((step + 1) / max(1, 0.1 * total), (total - step) / max(1, 0.9 * total))
    return share if bias_correction else share * (1 - 0.9 ** (step + 1)) / (1 - 0.999 ** (step + 1)) ** 0.5


def train(run, stage, heads, batch_loss, *, epochs, batch_size, lr, rows=None, begin_epoch=None, judge=None,
          patience=None, judge_start=False, more_steps=0, bias_correction=False):
    """Train the trained layers and heads for one stage of a method, in out/<run>_<method>/<stage>.pt; resumes a killed stage.

    heads: {name: nn.Module}. rows: int64, the training rows of an epoch (all of them). An epoch is begin_epoch(memory, step),
    which may train on more_steps other losses, step(loss, rows), and returns True when the method has converged, then
    batch_loss(rows, memory) for shuffled batches. memory is a dict of tensors and numbers that the checkpoint holds, with
    the number of the "epoch", from 1 on. AdamW with the schedule of lr_share. With judge(memory), the epoch with the least
    value is what is kept (judge_start: or the state before the first), and `patience` epochs without a better one end the
    stage; else the last one is. Returns memory of the epoch that is kept.
    """
    args, path = run.args, run.out / f"{stage}.pt"
    rows = torch.arange(len(run.label["train"]), device=run.device) if rows is None else rows
    modules = nn.ModuleDict({"trained_layers": run.encoder.trained_layers, **heads}).to(run.device)
    parameters = [p for p in modules.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01, fused=run.device.type == "cpu")
    total = (math.ceil(len(rows) / batch_size) + more_steps) * epochs
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_share(step, total, bias_correction))

    def step(loss, rows):
        optimizer.zero_grad()
        loss.backward()
        number = schedule.last_epoch + 1
        if not torch.isfinite(nn.utils.clip_grad_norm_(parameters, 1.0) + loss.detach()):
            where = f"step {number} of {stage} (epoch {memory['epoch']}), {rates_and_advice(optimizer)}"
            raise UserError(f"the loss is {loss.item()} or a gradient not finite in {where}; finished epochs are saved. "
                            f"Training rows of the batch: {sorted(rows.tolist())}")
        optimizer.step()
        check_weights(optimizer, f"step {number} of {stage}")
        schedule.step()
        return float(loss.detach())

    start, epoch, log, memory, done = time.monotonic(), 0, [], {}, False
    best = {"value": math.inf, "epoch": 0, "modules": trained_state(modules), "memory": {}}
    found = open_checkpoint(path, run.config, args)
    if found:
        pretrain.check_trunk(run.encoder, found)
        load_trained(modules, found["modules"])
        optimizer.load_state_dict(found["optimizer"])
        schedule.load_state_dict(found["schedule"])
        epoch, log, memory, best, done = (found[k] for k in ("epoch", "log", "memory", "best", "done"))
        start -= found["seconds"]
        memory = {k: v.to(run.device) if torch.is_tensor(v) else v for k, v in memory.items()}
        how = "done" if done else f"resuming after epoch {epoch}"
        print(f"{path} is there: {how}{in_other_type(found, run.config)}")
    elif args.restart:  # what another stage has left of other settings would be refused, after hours, without this flag
        (run.out / "last.pt").unlink(missing_ok=True)
    run.out.mkdir(parents=True, exist_ok=True)
    modules.eval()
    if judge_start and not found:
        best["value"] = judge(memory)
        best["memory"] = dict(memory)
    bar = tqdm(total=epochs, initial=epoch, desc=stage, disable=not sys.stderr.isatty())
    while not done and epoch < epochs:
        generator = seed_epoch(args.seed, epoch + 1)
        memory["epoch"] = epoch + 1
        done = bool(begin_epoch and begin_epoch(memory, step))
        if done:  # it has converged
            state = trained_state(modules)
            best |= {"epoch": epoch, "modules": state, "memory": dict(memory)}
        else:
            epoch += 1
            modules.train()
            order = rows[torch.randperm(len(rows), generator=generator).to(run.device)]
            losses = [step(batch_loss(part, memory), part) for part in order.split(batch_size)]
            modules.eval()
            value = judge(memory) if judge else -epoch
            log.append({"stage": stage, "epoch": epoch, "loss": sum(losses) / len(losses),
                        "seconds": time.monotonic() - start, **({"judged": value} if judge else {})})
            state = trained_state(modules)
            if value < best["value"]:
                best = {"value": value, "epoch": epoch, "modules": state, "memory": dict(memory)}
            done = epoch == epochs or bool(patience) and epoch - best["epoch"] >= patience
        write_atomic(run.out / "log.jsonl", "".join(json.dumps(line) + "\n" for line in run.log + log))
        save_checkpoint(path, modules=state, trunk=run.encoder.fingerprint, optimizer=optimizer.state_dict(),
                        schedule=schedule.state_dict(), epoch=epoch, log=log, memory=memory, best=best, done=done,
                        config=run.config, seconds=time.monotonic() - start)
        bar.update(epoch - bar.n)
    bar.close()
    load_trained(modules, best["modules"])
    run.seconds[stage] = time.monotonic() - start
    run.log += log
    run.epochs[stage], run.kept[stage] = epoch, best["epoch"]
    return {k: v.to(run.device) if torch.is_tensor(v) else v for k, v in best["memory"].items()}


# ---- the end of every method ----

def print_results(results, out):
    print(f"\n{results['method']}: {results['dataset']}, gamma {results['gamma']:g}, seed {results['seed']}, encoder "
          f"{results['encoder']}; test, percent")
    rows = {"protocol C": "test", "protocol T": "test_kmeans", "protocol C, labels held": "test_held",
            "C, seeded as in ImbaNID": "test_seeded", "k-means, raw": "kmeans_raw", "semi-sup. k-means, raw": "ss_kmeans_raw"}
    print_scores(results, {title: row for title, row in rows.items() if row in results})
    print(f"{sum(results['seconds'].values()):.0f} seconds; everything is in {out}/")


def finish(run, fit, dense=None, ends=("held", "seeded")):
    """Assign all rows to centres fitted on the training features, score, write results.json and what belongs to it.

    fit: (N, H) unit features of the training rows -> centres (K, H). dense: the layer behind the encoder where the method
    has one. confidence.npy holds the cosine to the own centre. ends: others to score on the same features, since a fit
    that makes nothing of the labels is worse for it: "held", GCD's semi-supervised k-means (test_held), "seeded", the search
    that ImbaNID's head starts from, with its defaults (test_seeded).
    """
    start = time.monotonic()
    run.out.mkdir(parents=True, exist_ok=True)
    z = {split: run.unit_features(split, dense) for split in run.raw}
    centre = fit(z["train"])
    run.seconds["cluster"], start = time.monotonic() - start, time.monotonic()
    found = {split: nearest(z[split], centre) for split in z}
    cosine = (normalize(z["train"], dim=1) * normalize(centre, dim=1)[found["train"]]).sum(1)
    seed = run.args.seed
    assigned, pred = (found[split].cpu().numpy() for split in ("train", "test"))
    raw, held = kmeans_rows(run.raw, run.label["train"], run.K, run.num_known, seed)
    clusters = {"test": pred, "test_kmeans": kmeans(z["test"], run.K, seed)[1].cpu().numpy(), "kmeans_raw": raw,
                "ss_kmeans_raw": held}
    given = z["train"], run.label["train"], run.K, run.num_known
    for end in ends:
        centre = semi_supervised_kmeans(*given, seed, 100, True) if end == "held" else seed_centres(
            *given, *seeding_settings(train_imbanid.Args(), run.meta), seed)
        clusters[f"test_{end}"] = nearest(z["test"], centre).cpu().numpy()
    scores = score(clusters, assigned, run.labels, run.data, run.num_known)
    arrays = {"pseudo_label": assigned, "confidence": cosine.cpu().numpy(), "test_pred": pred,
              "beta": np.bincount(assigned, minlength=run.K) / len(assigned),
              "train_feature": z["train"].half().cpu().numpy(), "test_feature": z["test"].cpu().numpy()}
    run.seconds["evaluate"] = time.monotonic() - start
    results = {"dataset": run.meta["dataset"], "gamma": run.meta["gamma"], "seed": seed, "method": run.method,
               "tag": run.args.tag, "encoder": run.args.encoder, "epochs": run.epochs, "kept": run.kept, **scores,
               "num_classes": run.K, "seconds": run.seconds, "commit": run.code, "config": run.config,
               "on_dev": bool(run.meta.get("on_dev"))}
    save_run(run.out, arrays, results)
    print_results(results, run.out)
