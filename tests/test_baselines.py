"""The compared methods: their pieces against plain formulas, each whole on the demo corpus, resumed after a kill, bad flags."""
import importlib
import itertools
import json
import shutil
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import REPO, kept_passes, one_line_error, pretrained_demo, script
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from sklearn.metrics import silhouette_score
from torch.nn.functional import cross_entropy, normalize

import train_imbanid
from baselines import shared
from baselines.clnn import nearest_rows, neighbour_loss
from baselines.dpn import prototype_loss
from baselines.latentem import assignment_loss, pass_labels_on
from baselines.usnid import erase_tokens
from encoder import Encoder
from losses import instance_wise_loss
from make_lt_data import UserError
from metrics import cluster_metrics, match_clusters
from pretrain import locked
from seeding import kmeans, nearest, semi_supervised_kmeans

NAMES = ("gcd", "deepaligned", "clnn", "dpn", "latentem", "usnid")
PRETRAINED = ("deepaligned", "dpn", "usnid")  # by themselves


def method(name, **flags):
    """main of a method's script with these flags, in this process."""
    module = importlib.import_module(f"baselines.{name}")
    module.main(module.Args(**flags))


def unit(*shape, seed=0):
    return normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=-1)


# ---- pieces ----

def test_supervised_contrast_is_supcon():
    z, label = unit(5, 2, 8), torch.tensor([0, 0, 1, -1, -1])
    flat, y = z.flatten(0, 1), label.repeat_interleave(2)
    total = 0.0
    for i in range(10):
        others = [j for j in range(10) if j != i]
        positive = [j for j in others if j // 2 == i // 2 or (y[i] >= 0 and y[i] == y[j])]
        log_sum = torch.logsumexp(torch.stack([flat[i] @ flat[j] / 0.1 for j in others]), 0)
        total -= sum(flat[i] @ flat[j] / 0.1 - log_sum for j in positive) / len(positive) / 10
    assert float(shared.supervised_contrast(z, label, 0.1)) == pytest.approx(float(total))


def test_neighbour_loss_against_its_formula():
    z, positive = unit(4, 2, 8), torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)
    flat, total = z.flatten(0, 1), 0.0
    for a in range(8):
        others = [j for j in range(8) if j != a]
        log_sum = torch.logsumexp(torch.stack([flat[a] @ flat[j] / 0.2 for j in others]), 0)
        mine = [j for j in others if j // 2 == a // 2 or positive[a // 2, j // 2]]
        total -= sum(flat[a] @ flat[j] / 0.2 - log_sum for j in mine) / len(mine) / 8
    assert float(neighbour_loss(z, positive, 0.2)) == pytest.approx(float(total))


def test_nearest_rows_leave_the_row_itself_out():
    z = unit(40, 6)
    found = nearest_rows(z, 3)
    similarity = z @ z.T - 9 * torch.eye(40)
    assert (found != torch.arange(40)[:, None]).all()
    assert torch.equal(found.sort(1).values, similarity.topk(3).indices.sort(1).values)


def test_prototype_losses():
    z, prototype = unit(3, 6) * 2, unit(4, 6, seed=1) * 0.5
    for distance in ("cosine", "euclidean"):
        for i in range(3):
            cosine = torch.nn.functional.cosine_similarity(z[i][None], prototype)
            far = 1 - cosine if distance == "cosine" else (z[i] - prototype).norm(dim=1)
            expected = float(((cosine / 0.1).softmax(0) * far).sum())
            assert float(prototype_loss(z, prototype, 0.1, distance)[i]) == pytest.approx(expected)


def test_assignment_loss_is_a_mean_over_pairs():
    p, cluster = unit(5, 6), torch.tensor([0, 0, 0, 1, 2])
    terms = []
    for i in range(5):
        log_sum = torch.logsumexp(torch.stack([p[i] @ p[k] / 0.3 for k in range(5) if k != i]), 0)
        terms += [log_sum - p[i] @ p[j] / 0.3 for j in range(5) if j != i and cluster[i] == cluster[j]]
    assert float(assignment_loss(p, cluster, 0.3)) == pytest.approx(float(sum(terms) / len(terms)))
    assert float(assignment_loss(p, torch.arange(5), 0.3)) == 0  # no pair, no NaN


def test_labels_are_passed_on_within_a_cluster_alone():
    z = normalize(torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.01], [0.0, 1.0], [0.1, 1.0]]), dim=1)
    label, cluster = torch.tensor([3, -1, -1, 7, -1]), torch.tensor([0, 0, 1, 2, 1])
    assert pass_labels_on(z, label, cluster).tolist() == [3, 3, -1, 7, -1]  # row 2 is nearer but in another cluster
    assert label.tolist() == [3, -1, -1, 7, -1]


def test_align_undoes_a_shuffling():
    centre, order = unit(7, 5), torch.randperm(7, generator=torch.Generator().manual_seed(3))
    assert torch.equal(centre[order][shared.align(centre, centre[order])], centre)
    known = shared.align(centre[:3], centre[order])  # fewer prototypes than clusters, as in DPN
    assert torch.equal(centre[order][known], centre[:3])


def test_erased_tokens(tiny_encoder):
    encoder = Encoder(str(tiny_encoder), 32, torch.device("cpu"), torch.float32)
    tokens = encoder.tokenize(["set an alarm for six in the morning please", "play", "turn the light off now"] * 20)
    erased = erase_tokens(encoder)(tokens, 0.4, torch.Generator().manual_seed(0))
    special = encoder.special(erased)
    for row in range(60):
        before = tokens.values[tokens.offsets[row]:tokens.offsets[row + 1]]
        after = erased.values[erased.offsets[row]:erased.offsets[row + 1]]
        assert len(after) == len(before) - int(0.4 * (len(before) - 2))
        left = iter(before.tolist())
        assert all(token in left for token in after.tolist()), "the order must stay"
    assert special.sum() == 2 * 60
    assert not torch.equal(erased.values[:erased.offsets[1]], erased.values[erased.offsets[3]:erased.offsets[4]])


def test_steps_without_bias_correction_are_bertadams():
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: shared.lr_share(step, 40, False))
    first = second = value = 0.0
    for step in range(40):
        gradient = (-1.0) ** (step // 3) * (1 + step)
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient ** 2
        value -= 0.1 * min((step + 1) / 4, (40 - step) / 36) * first / second ** 0.5
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        schedule.step()
        assert weight.item() == pytest.approx(value, rel=1e-5)


# ---- losses, put together ----

TAGS = itertools.count()


class StoppedError(Exception):
    pass


def stages(name, flags, monkeypatch):
    """(run, {stage: (heads, batch_loss, the other arguments)}) of what a method hands to shared.train, which is not run."""
    found = {}

    def record(run, stage, heads, batch_loss, **more):
        for module in (run.encoder.trained_layers, *heads.values()):
            module.eval()  # without dropout
        found[stage] = heads, batch_loss, more
        if stage == "last":
            raise StoppedError(run)
        return {}

    monkeypatch.setattr(importlib.import_module(f"baselines.{name}"), "train", record)
    monkeypatch.setattr(shared, "train", record)
    with pytest.raises(StoppedError) as stopped:
        method(name, **flags, tag=f"recorded{next(TAGS)}")  # the run stays open, and with it its folder
    return stopped.value.args[0], found


def features(run, rows, hidden=None):
    return run.encoder.features(run.hidden["train"] if hidden is None else hidden, rows)


ROWS = torch.arange(3, 60, 2)


def test_gcds_loss(tiny_flags, monkeypatch):
    run, found = stages("gcd", tiny_flags, monkeypatch)
    heads, batch_loss, _ = found["last"]
    label = run.label["train"]
    torch.manual_seed(1)
    loss = batch_loss(ROWS, {"epoch": 1})
    torch.manual_seed(1)
    share = torch.where(label >= 0, 1 / (label >= 0).sum(), 1 / (label < 0).sum())  # as many of either kind
    rows = torch.multinomial(share, len(ROWS), replacement=True)
    view = run.view(1, run.encoder.replace_tokens, 0.25, 2)
    z = normalize(heads["head"](torch.stack([features(run, rows), features(run, rows, view)], 1)), dim=2)
    held = label[rows] >= 0
    assert 2 < held.sum() < len(rows) - 2
    expected = 0.65 * instance_wise_loss(z, 0.07).mean() + 0.35 * shared.supervised_contrast(z[held], label[rows][held], 0.07)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)


def test_deepaligneds_loss(tiny_flags, monkeypatch):
    run, found = stages("deepaligned", {**tiny_flags, "pretrain_epochs": 1}, monkeypatch)
    heads, batch_loss, more = found["last"]
    label, (known, classify, told) = run.label["train"], found["pretrain"]
    assert torch.equal(told["rows"], torch.where(label >= 0)[0])
    z = known["dense"](features(run, run.labelled[:9]))
    assert float(classify(run.labelled[:9], {}).detach()) == pytest.approx(
        float(cross_entropy(known["classifier"](z), label[run.labelled[:9]]).detach()))
    memory = {}
    more["judge"](memory)
    first = dict(memory)
    memory["centre"] = memory["centre"].roll(2, 0)  # the same clusters in another order, to which the next are matched
    more["judge"](memory)
    assert torch.equal(memory["pseudo_label"], (first["pseudo_label"] + 2) % run.K)
    z = heads["dense"](features(run, ROWS))
    assert float(batch_loss(ROWS, memory).detach()) == pytest.approx(
        float(cross_entropy(heads["head"](z), memory["pseudo_label"][ROWS]).detach()))


def test_clnns_loss(tiny_flags, monkeypatch):
    run, found = stages("clnn", {**tiny_flags, "topk": 2}, monkeypatch)
    heads, batch_loss, more = found["last"]
    memory, label = {"epoch": 1}, run.label["train"]
    more["begin_epoch"](memory, None)
    near = memory["near"]
    assert torch.equal(near, nearest_rows(run.encoder.all_features(run.hidden["train"]), 2))
    for epoch in (2, 5, 6):
        memory |= {"epoch": epoch, "near": near + 1}
        more["begin_epoch"](memory, None)
        assert torch.equal(memory["near"], near) == (epoch == 6), "a search serves five epochs"
    rows = torch.cat([run.labelled, near[run.labelled].flatten()]).unique()
    torch.manual_seed(1)
    loss = batch_loss(rows, {"epoch": 1, "near": near})
    torch.manual_seed(1)
    partner = near[rows, torch.randint(2, (len(rows), 1))[:, 0]]
    first, second = (run.view(1, run.encoder.replace_tokens, 0.25, copy=copy) for copy in (0, 1))
    z = normalize(heads["head"](torch.stack([features(run, rows, first), features(run, partner, second)], 1)), dim=2)
    positive = torch.tensor([[bool((near[i] == j).any()) or bool(label[i] == label[j] >= 0) for j in rows] for i in rows])
    assert float(loss.detach()) == pytest.approx(float(neighbour_loss(z, positive, 0.07).detach()), rel=1e-4)


def test_dpns_pretraining_is_of_its_dense_layer_too(tiny_flags, monkeypatch):
    run, found = stages("dpn", tiny_flags | {"pretrain_batch_size": 9, "mask_epochs": 2, "patience": 4}, monkeypatch)
    heads, batch_loss, more = found["pretrain"]
    assert heads["dense"] is found["last"][0]["dense"] and heads["mlm_head"] is run.encoder.mlm_head
    assert (more["batch_size"], more["patience"], more["lr"], more["bias_correction"]) == (9, 4, 5e-5, True)
    with torch.no_grad():
        dev = heads["known"](heads["dense"](run.encoder.all_features(run.hidden["dev"])))
    assert more["judge"]({}) == pytest.approx(float(cross_entropy(dev, run.label["dev"])), rel=1e-5)
    losses = []
    for epoch in (1, 2, 3):
        torch.manual_seed(1)
        losses.append(float(batch_loss(ROWS, {"epoch": epoch}).detach()))
        torch.manual_seed(1)
        rows, masked = run.draw_labelled(9), run.views[0][1]
        ce = cross_entropy(heads["known"](heads["dense"](features(run, rows))), run.label["train"][rows])
        changed = (masked.values != run.hidden["train"].values).any(1).nonzero()[:, 0]
        assert len(changed) > 20, "nothing is masked"
        assert losses[-1] > float(ce.detach()) + 1, "no word to guess"
    assert losses[0] == losses[1] != losses[2]  # as long as two epochs share the masks


def test_dpns_loss(tiny_flags, monkeypatch):
    run, found = stages("dpn", tiny_flags, monkeypatch)
    heads, batch_loss, more = found["last"]
    memory, label = {}, run.label["train"]

    def labelled_means():
        with torch.no_grad():
            rows = [torch.where(label == k)[0] for k in range(run.num_known)]
            return torch.stack([heads["dense"](features(run, of_class)).mean(0) for of_class in rows])

    more["begin_epoch"](memory, None)
    assert torch.allclose(memory["known"], labelled_means(), atol=1e-6)
    own = torch.cdist(heads["dense"](run.encoder.all_features(run.hidden["train"])), memory["cluster"]).argmin(1)
    matched = linear_sum_assignment(torch.cdist(memory["known"], memory["cluster"]))[1]
    assert torch.equal(memory["is_known"], torch.isin(own, torch.from_numpy(matched)))
    assert 0 < memory["is_known"].sum() < len(own)
    before = {key: value.clone() for key, value in memory.items()}
    with torch.no_grad():
        heads["dense"][0].weight.mul_(1.5)
    more["begin_epoch"](memory, None)
    assert torch.allclose(memory["known"], 0.9 * before["known"] + 0.1 * labelled_means(), atol=1e-6)
    assert torch.equal(memory["cluster"], before["cluster"])
    torch.manual_seed(1)
    loss = batch_loss(ROWS, memory)
    torch.manual_seed(1)
    drawn, z = run.draw_labelled(64), heads["dense"](features(run, ROWS))
    expected = (prototype_loss(z, memory["cluster"], 0.07, "euclidean").mean()
                + 10 * prototype_loss(z, memory["known"], 0.07, "cosine")[memory["is_known"][ROWS]].sum() / len(ROWS)
                + cross_entropy(heads["head"](heads["dense"](features(run, drawn))), label[drawn]))
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)


def test_latentems_loss(tiny_flags, monkeypatch):
    run, found = stages("latentem", tiny_flags, monkeypatch)
    heads, batch_loss, more = found["last"]
    memory, label = {"epoch": 1}, run.label["train"]
    more["begin_epoch"](memory, None)
    z = run.unit_features(dense=heads["dense"])
    assert torch.equal(memory["label"], pass_labels_on(z, label, memory["cluster"]))
    assert (memory["label"] >= 0).sum() > (label >= 0).sum()
    z, y = heads["dense"](features(run, ROWS)), memory["label"][ROWS]
    expected = (0.4 * assignment_loss(normalize(heads["projection"](z), dim=1), memory["cluster"][ROWS], 0.1)
                + 0.6 * cross_entropy(heads["known"](z[y >= 0]), y[y >= 0]))
    assert float(batch_loss(ROWS, memory).detach()) == pytest.approx(float(expected.detach()), rel=1e-4)


def toy_run(folder, seed=0, rows=6):
    """What shared.train needs of a Run, with a trained layer of one weight, 5."""
    layer = torch.nn.Linear(1, 1, bias=False)
    layer.weight.data.fill_(5.0)
    return SimpleNamespace(args=SimpleNamespace(seed=seed, restart=False), out=folder, device=torch.device("cpu"), config={},
                           encoder=SimpleNamespace(trained_layers=layer, fingerprint="a"), label={"train": torch.zeros(rows)},
                           log=[], seconds={}, epochs={}, kept={})


def test_the_loop_of_a_stage_keeps_the_best_epoch_and_follows_its_schedule(tmp_path):
    """A loss whose gradient is always 1: Adam's steps are then the learning rate, and the weight says what it was."""
    run = toy_run(tmp_path)
    layer = run.encoder.trained_layers
    weights, training, judged, values = [5.0], [], [], iter([3.0, 1.0, 2.0, 1.5, 0.0])

    def batch_loss(rows, memory):
        training.append(layer.training)
        if len(training) > 1:
            weights.append(layer.weight.item())
        return layer.weight.sum()

    def judge(memory):
        judged.append((layer.training, layer.weight.item()))
        memory["of"] = memory["epoch"]
        return next(values)

    memory = shared.train(run, "toy", {}, batch_loss, epochs=9, batch_size=2, lr=0.01, judge=judge, patience=2,
                          bias_correction=True)
    assert all(training) and not any(mode for mode, _ in judged) and len(training) == 4 * 3
    assert run.epochs == {"toy": 4} and run.kept == {"toy": 2} and memory["of"] == 2
    assert layer.weight.item() == judged[1][1] != judged[3][1]
    for n, (before, after) in enumerate(zip(weights, weights[1:])):
        rate = 0.01 * shared.lr_share(n, 27, True)
        assert before - after == pytest.approx(rate + 0.01 * rate * before, rel=1e-3)


def test_usnids_losses(tiny_flags, monkeypatch):
    run, found = stages("usnid", {**tiny_flags, "pretrain_epochs": 1}, monkeypatch)
    label, (heads, pretrain_loss, told) = run.label["train"], found["pretrain"]
    assert torch.equal(told["rows"], torch.where(label < 0)[0])
    rows = told["rows"][:30]
    torch.manual_seed(1)
    loss = pretrain_loss(rows, {})
    torch.manual_seed(1)
    drawn = run.draw_labelled(64)
    both = torch.cat([drawn, rows])
    z = heads["dense"](features(run, both))
    p = normalize(heads["contrast"](z), dim=1)[:, None].expand(-1, 2, -1)  # the views differ by dropout alone
    expected = (cross_entropy(heads["known"](z[:len(drawn)]), label[drawn])
                + shared.supervised_contrast(p, label[both], 0.07))
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)

    heads, batch_loss, more = found["last"]
    memory, steps = {"epoch": 1}, []
    assert not more["begin_epoch"](memory, lambda loss, rows: steps.append(float(loss.detach())))
    assert len(steps) == more["more_steps"] == -(-len(run.labelled) // 64) and min(steps) > 0
    assert more["begin_epoch"](memory, lambda loss, rows: None), "the same clusters again: it has converged"
    views = [run.view(1, erase_tokens(run.encoder), 0.4, 2, copy) for copy in (0, 1)]
    z = heads["dense"](torch.stack([features(run, ROWS, view) for view in views], 1))
    y = memory["pseudo_label"][ROWS]
    expected = (cross_entropy(heads["head"](z).flatten(0, 1), y.repeat_interleave(2))
                + shared.supervised_contrast(normalize(heads["contrast"](z), dim=2), y, 0.05))
    assert float(batch_loss(ROWS, memory).detach()) == pytest.approx(float(expected.detach()), rel=1e-4)


# ---- whole methods ----

@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return pretrained_demo(tmp_path_factory.mktemp("demo"), seed=0, epochs=5)


def real(name, demo, **flags):
    """method, with the real encoder."""
    with kept_passes():
        method(name, **demo, encoder="minilm", **flags)


def clustered(demo, name):
    """ACC under protocol T, the mean of twenty k-means: of 360 test rows, the mean of ten is off by a point still."""
    truth, counts = (np.load(f"{demo['data_dir']}/demo_g10_s0/{file}.npy") for file in ("test_label", "class_counts"))
    z = np.load(f"{demo['out_dir']}/demo_g10_s0_{name}/test_feature.npy")
    found = [KMeans(24, n_init=3, random_state=seed).fit_predict(z) for seed in range(20)]
    return np.mean([cluster_metrics(truth, cluster, 18, counts)["ACC"] for cluster in found])


@pytest.fixture(scope="module")
def start_acc(demo):
    """T of the features that the methods start from: of the encoder as it comes, and of pretrain.py."""
    real("kmeans", demo)
    real("kmeans", demo, features="pretrained", tag="pretrained")
    return {name: clustered(demo, name) for name in ("kmeans", "kmeans_pretrained")}


@pytest.mark.parametrize("name", NAMES)
def test_each_method_whole_with_the_real_encoder(demo, start_acc, name, capsys):
    """Two epochs against k-means on raw features, above which they end: GCD under protocol C, the others under T.

    Two epochs, with 91 labelled rows to learn from, move T by less than it varies, so against what pretrain.py leaves those
    that start from there are only asked to do no harm. DeepAligned has its own pre-training, of at most 100 epochs,
    which its patience ends: with one batch each, fewer would be all warm-up.
    """
    short = {"deepaligned": {"pretrain_epochs": 100, "patience": 3}, "usnid": {"pretrain_epochs": 2},
             "dpn": {"pretrain_epochs": 10}}.get(name, {})
    real(name, demo, epochs=2, **short)
    start = "kmeans_pretrained" if name in ("clnn", "latentem") else "kmeans"
    results, plain = (json.loads((Path(demo["out_dir"]) / f"demo_g10_s0_{which}/results.json").read_text())
                      for which in (name, "kmeans"))
    assert results["method"] == name
    out, weight = Path(demo["out_dir"]), "0.attention.self.query.weight"
    own = out / f"demo_g10_s0_{name}/pretrain.pt"  # of a pre-training that is part of the method
    if start == "kmeans_pretrained":
        before = torch.load(out / "demo_g10_s0/pretrain.pt", weights_only=True)["trained_layers"][weight]
    elif own.exists():
        before = torch.load(own, weights_only=True)["best"]["modules"][f"trained_layers.{weight}"]
    else:
        before = dict(Encoder("minilm", 128, torch.device("cpu"), torch.float32).trained_layers.named_parameters())[weight]
    moved = torch.load(out / f"demo_g10_s0_{name}/last.pt", weights_only=True)["modules"][f"trained_layers.{weight}"] - before
    assert own.exists() == bool(short)
    assert moved.norm() > 1e-4 * before.norm(), "the layer has not moved"
    found = clustered(demo, name)
    if name == "gcd":
        assert results["test"]["ACC"] > plain["test"]["ACC"] + 3 and "test_held" not in results
    else:  # GCD's own end under C, on these features
        z, test = (torch.tensor(np.load(out / f"demo_g10_s0_{name}/{split}_feature.npy")).float()
                   for split in ("train", "test"))
        label, truth, count = (np.load(out.parent / f"data/demo_g10_s0/{file}.npy") for file in (
            "train_label", "test_label", "class_counts"))
        centre = semi_supervised_kmeans(z, torch.tensor(label), 24, 18, 0, 100, True)
        again = cluster_metrics(truth, torch.cdist(test, centre).argmin(1).numpy(), 18, count)["ACC"]
        assert abs(results["test_held"]["ACC"] - again) < 2, "float16 features, else the same"
        assert found > start_acc["kmeans"]
    assert {"ACC", "NMI"} < results["test_seeded"].keys() and results["test_seeded"] != results["test"]
    assert found > start_acc[start] - 3
    check_protocol_c(Path(demo["out_dir"]) / f"demo_g10_s0_{name}", demo, results)
    capsys.readouterr()
    real(name, demo, epochs=2, **short)
    assert "skipped" in capsys.readouterr().out


def check_protocol_c(out, demo, results):
    """The headline's test rows are those of test_pred.npy, and lie with the training rows of their cluster."""
    truth, counts = (np.load(f"{demo['data_dir']}/demo_g10_s0/{file}.npy") for file in ("test_label", "class_counts"))
    pred, cluster, z, test_z = (np.load(out / f"{file}.npy") for file in (
        "test_pred", "pseudo_label", "train_feature", "test_feature"))
    assert cluster_metrics(truth, pred, 18, counts) == results["test"]
    mean = np.stack([z[cluster == k].astype(float).mean(0) if (cluster == k).any() else np.full(z.shape[1], 9.0)
                     for k in range(24)])
    nearest = ((test_z[:, None] - mean) ** 2).sum(2).argmin(1)
    assert (nearest == pred).mean() > 0.9


class KilledError(Exception):
    pass


@pytest.fixture
def tiny_flags(tiny_run, tiny_encoder, short_ends):
    """Flags that finish in seconds: the tiny corpus, the tiny encoder, what pretrain.py made of them."""
    task = dict(zip((word.lstrip("-") for word in map(str, tiny_run[0][::2])), tiny_run[0][1::2]))
    folders = {key: str(task[key]) for key in ("data_dir", "out_dir")}
    return {**task, **folders, "gamma": 4.0, "encoder": str(tiny_encoder), "dtype": "float32", "max_length": 32,
            "batch_size": 64, "epochs": 2}


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_run_ends_like_one_that_was_not(tiny_flags, name, monkeypatch):
    tiny_flags = tiny_flags | {"epochs": 3} | ({"pretrain_epochs": 2} if name in PRETRAINED else {})
    method(name, **tiny_flags)
    whole = Path(tiny_flags["out_dir"]) / f"demo_g4_s0_{name}"
    save, calls = shared.save_checkpoint, []

    def save_once(*args, **state):
        save(*args, **state)
        calls.append(args)
        if len(calls) % 2:
            raise KilledError

    monkeypatch.setattr(shared, "save_checkpoint", save_once)
    for _ in range(20):
        try:
            method(name, **tiny_flags, tag="killed")
            break
        except KilledError:
            continue
    part = whole.with_name(whole.name + "_killed")
    assert len(calls) > 2
    for file in ("test_pred.npy", "test_feature.npy", "pseudo_label.npy", "confidence.npy", "beta.npy"):
        assert (whole / file).read_bytes() == (part / file).read_bytes(), file
    a, b = (json.loads((folder / "results.json").read_text()) for folder in (whole, part))
    assert a["test"] == b["test"] and a["epochs"] == b["epochs"]
    logs = [[{**json.loads(line), "seconds": 0} for line in (folder / "log.jsonl").read_text().splitlines()]
            for folder in (whole, part)]
    assert logs[0] == logs[1], "a line of an epoch whose checkpoint was written last"
    assert np.load(whole / "beta.npy").sum() == pytest.approx(1)
    trained = torch.load(whole / "last.pt", weights_only=True)["modules"]
    assert any(part.startswith("dense") for part in trained) == (name not in ("gcd", "clnn"))


def test_hidden_labels_change_no_byte(tiny_flags, tiny_run):
    hidden = [tiny_run[1] / f"data/demo_g4_s0/{name}.npy" for name in ("train_truth", "test_label", "class_counts")]
    kept = [path.read_bytes() for path in hidden]
    for path in hidden:
        np.save(path, np.roll(np.load(path), 7))
    try:
        for name in NAMES:
            method(name, **{**tiny_flags, "epochs": 1}, tag="shuffled", **(
                {"pretrain_epochs": 1} if name in PRETRAINED else {}))
    finally:
        for path, content in zip(hidden, kept):
            path.write_bytes(content)
    for name in NAMES:
        method(name, **{**tiny_flags, "epochs": 1}, tag="seen", **(
            {"pretrain_epochs": 1} if name in PRETRAINED else {}))
        first, second = (Path(tiny_flags["out_dir"]) / f"demo_g4_s0_{name}_{tag}" for tag in ("shuffled", "seen"))
        for file in ("test_pred.npy", "pseudo_label.npy", "train_feature.npy"):
            assert (first / file).read_bytes() == (second / file).read_bytes()


def test_pre_training_of_its_own(tiny_flags, tmp_path):
    """LatentEM's --ce_only, and a method that finds no pretrain.pt and has it made."""
    method("latentem", **tiny_flags, ce_only=True, pretrain_epochs=2, tag="ce")
    results = json.loads((Path(tiny_flags["out_dir"]) / "demo_g4_s0_latentem_ce/results.json").read_text())
    assert results["epochs"] == {"pretrain": 2, "last": 2} and results["config"]["pretrain"] is None
    method("kmeans", **{k: v for k, v in tiny_flags.items() if k not in ("batch_size", "epochs", "out_dir")},
           out_dir=str(tmp_path), features="pretrained")
    assert (tmp_path / "demo_g4_s0/pretrain.pt").exists() and (tmp_path / "demo_g4_s0_kmeans/results.json").exists()


@pytest.mark.parametrize("name, stage", [("gcd", "last"), *((name, "pretrain") for name in PRETRAINED)])
def test_one_known_class_tells_nothing_of_when_to_stop(tiny_raw, tiny_flags, tmp_path, name, stage):
    """Dev's only class is always found, after the first epoch too: the last one is kept, as pretrain.py does."""
    flags = tiny_flags | {"known_ratio": 0.125, "data_dir": str(tmp_path / "data"), "out_dir": str(tmp_path / "out")}
    task = [word for key in ("dataset", "gamma", "seed", "known_ratio", "data_dir") for word in (f"--{key}", flags[key])]
    script("make_lt_data.py", *task, "--raw_dir", tiny_raw)
    method(name, **flags, **({"pretrain_epochs": 3} if stage == "pretrain" else {}))
    run = next((tmp_path / "out").glob(f"*_{name}"))
    results = json.loads((run / "results.json").read_text())
    assert results["kept"][stage] == results["epochs"][stage] == (3 if stage == "pretrain" else 2)
    assert not any("judged" in line for line in map(json.loads, (run / "log.jsonl").read_text().splitlines())
                   if line["stage"] == stage)


def test_weights_that_ran_away_are_not_saved(tiny_flags, monkeypatch):
    """A step that leaves finite losses and useless weights ends in one line, before k-means or a checkpoint sees them."""
    monkeypatch.setattr(shared, "lr_share", lambda *_: 1e30)
    with pytest.raises(shared.UserError, match="a weight of|or a gradient not finite"):
        method("gcd", **{**tiny_flags, "batch_size": 100000}, tag="away")
    assert not (Path(tiny_flags["out_dir"]) / "demo_g4_s0_gcd_away/last.pt").exists()
    with pytest.raises(shared.UserError, match="a weight of"):  # within begin_epoch
        method("usnid", **tiny_flags, pretrain_epochs=1, tag="away")


@pytest.mark.parametrize("value, loss", [("nan", lambda total: total * np.nan), ("-?0.0", lambda total: (0 * total) ** 0.5)])
def test_a_gradient_that_is_not_finite(tiny_flags, monkeypatch, value, loss):
    """It ends the run with the step, the learning rate and the batch's rows, before a step is taken with it."""
    monkeypatch.setattr("baselines.clnn.neighbour_loss", lambda z, *_: loss(z.sum()))
    with pytest.raises(shared.UserError, match=rf"loss is {value} .* step 1 of last \(epoch 1\), at lr \d.*batch: \[\d+, \d+"):
        method("clnn", **tiny_flags, tag="nan")
    assert not (Path(tiny_flags["out_dir"]) / "demo_g4_s0_clnn_nan/last.pt").exists()


def test_bad_flags_end_in_one_line(tiny_flags, tiny_run):
    task = ("--data_dir", tiny_flags["data_dir"], "--out_dir", tiny_flags["out_dir"], "--dataset", "demo", "--gamma", 4)
    for name, words, expected in (("usnid", ["--erase_rate", 2], "erase_rate"), ("kmeans", ["--features", "bert"], "features"),
                                  ("gcd", ["--topk", 3], "topk"), ("clnn", ["--tag", "a/b"], "tag"),
                                  ("deepaligned", ["--epochs", 0], "epochs"), ("latentem", ["--lr", "nan"], "lr"),
                                  ("dpn", ["--batch_size", -1], "--batch_size"),
                                  ("dpn", ["--pretrain_batch_size", -1], "pretrain_batch_size"),
                                  ("latentem", ["--patience", 3], "without --ce_only"),
                                  ("kmeans", ["--n_init", 7], "without --semi_supervised")):
        one_line_error(script("-m", f"baselines.{name}", *task, *words, ok=False), expected)
    with pytest.raises(shared.UserError, match="benchmark|run on"):
        method("dpn", **{**tiny_flags, "dataset": "my.csv"})
    method("clnn", **{**tiny_flags, "epochs": 1, "tag": "first"})
    with pytest.raises(shared.UserError, match="other settings"):
        method("clnn", **{**tiny_flags, "epochs": 1, "tag": "first", "topk": 3})
    for flag, value in (("encoder", "minilm"), ("max_length", 16)):
        with pytest.raises(shared.UserError, match=f"--{flag}"):
            method("latentem", **{**tiny_flags, flag: value, "tag": "other"})
    one_line_error(script("train_imbanid.py", *tiny_run[0], "--tag", "clnn_first", ok=False), "run of clnn", "--tag")
    method("gcd", **{**tiny_flags, "epochs": 1, "tag": "first"})
    finished = Path(tiny_flags["out_dir"]) / "demo_g4_s0_gcd_first/results.json"
    with pytest.raises(shared.UserError, match="max_length"):
        method("gcd", **{**tiny_flags, "epochs": 1, "tag": "first", "max_length": 2}, restart=True)
    assert finished.exists(), "what was refused has replaced nothing"
    method("kmeans", **{k: v for k, v in tiny_flags.items() if k not in ("batch_size", "epochs")}, tag="first")
    one_line_error(script("predict.py", finished.parent.with_name("demo_g4_s0_kmeans_first"), ok=False), "no cluster head")


def test_a_restart_that_was_killed_in_the_first_of_two_stages_goes_on_without_the_flag(tiny_flags, monkeypatch):
    flags, one_epoch = {**tiny_flags, "epochs": 1, "pretrain_epochs": 2, "tag": "again"}, iter([1.0])
    method("deepaligned", **flags)
    with monkeypatch.context() as killed, pytest.raises(StopIteration):
        killed.setattr(shared, "dev_judge", lambda *_: lambda memory: next(one_epoch))
        method("deepaligned", **flags, lr=1e-4, restart=True)
    method("deepaligned", **flags, lr=1e-4)  # a last.pt of the old settings would be refused here


def test_the_seeded_end_is_what_imbanid_starts_from(demo):
    real("kmeans", demo, features="pretrained", semi_supervised=True, tag="seeded")
    with kept_passes():
        train_imbanid.main(train_imbanid.Args(**demo, epochs=0, tag="no_training"))
    seeded, start = (json.loads((Path(demo["out_dir"]) / f"demo_g10_s0_{tag}/results.json").read_text())
                     for tag in ("kmeans_seeded", "no_training"))
    assert seeded["test_seeded"] == start["test"]


def test_the_method_in_the_readme_runs(tiny_flags, tmp_path):
    text = (REPO / "baselines/README.md").read_text()
    code = text[text.index('```python\n"""What it is."""') + len("```python\n"):].split("```")[0]
    (tmp_path / "mine.py").write_text(code)
    words = [word for key, value in {**tiny_flags, "tag": "of_ones_own"}.items() for word in (f"--{key}", value)]
    done = script(tmp_path / "mine.py", *words, env={"PYTHONPATH": str(REPO)})
    out = Path(tiny_flags["out_dir"]) / "demo_g4_s0_mine_of_ones_own"
    assert json.loads((out / "results.json").read_text())["method"] == "mine" and "protocol C" in done.stdout


def test_a_second_run_in_the_same_folder_is_told_so(tiny_flags):
    out = Path(tiny_flags["out_dir"]) / "demo_g4_s0_gcd_twice"
    with locked(out), pytest.raises(UserError, match=f"another run is writing to {out}/"):
        method("gcd", **tiny_flags, tag="twice")
    assert not out.exists()
    method("gcd", **tiny_flags, tag="twice")


def test_the_loop_clips_counts_other_steps_and_may_keep_the_start(tmp_path):
    run = toy_run(tmp_path)
    layer = run.encoder.trained_layers
    weights, values = [], iter([1.0, 3.0, 2.0])

    def batch_loss(rows, memory):
        weights.append(layer.weight.item())
        return 10 ** len(weights) * layer.weight.sum()  # every gradient is clipped to 1

    shared.train(run, "toy", {}, batch_loss, epochs=9, batch_size=2, lr=0.01, judge=lambda memory: next(values), patience=2,
                 judge_start=True, more_steps=5, bias_correction=True)
    assert run.epochs == {"toy": 2} and run.kept == {"toy": 0} and layer.weight.item() == 5
    for n, (before, after) in enumerate(itertools.pairwise(weights)):
        rate = 0.01 * shared.lr_share(n, (3 + 5) * 9, True)
        assert before - after == pytest.approx(rate + 0.01 * rate * before, rel=1e-3)


def test_views_and_drawings(tiny_flags, monkeypatch):
    run, found = stages("gcd", tiny_flags, monkeypatch)

    def view(epoch, copy=0):
        return run.view(epoch, run.encoder.replace_tokens, 0.5, 2, copy).values.clone()

    first, other = view(1), view(1, 1)
    assert torch.equal(first, view(2)) and not torch.equal(first, view(3)) and not torch.equal(first, other)
    assert len(run.draw_labelled(99)) == len(run.draw_labelled(99).unique()) == len(run.labelled)
    z, truth = run.unit_features("dev"), run.labels["dev"]
    cluster = kmeans(z, run.num_known, 0)[1].numpy()
    assert found["last"][2]["judge"]({}) == pytest.approx(-100 * (match_clusters(truth, cluster)[cluster] == truth).mean())


def test_what_deepaligned_stops_by(tiny_flags, monkeypatch):
    run, found = stages("deepaligned", {**tiny_flags, "pretrain_epochs": 1}, monkeypatch)
    (heads, _, told), (_, _, more) = found["pretrain"], found["last"]
    with torch.no_grad():
        logits = heads["classifier"](heads["dense"](run.encoder.all_features(run.hidden["dev"])))
    assert told["judge"]({}) == pytest.approx(float(cross_entropy(logits, run.label["dev"])), rel=1e-5)
    memory = {}
    value, z = more["judge"](memory), run.unit_features(dense=heads["dense"])
    assert value == pytest.approx(-silhouette_score(z.numpy(), memory["pseudo_label"].numpy()), abs=1e-6)
    assert more["judge_start"] and more["patience"] == told["patience"] == 20
    linear, _, dropout = heads["dense"]
    assert torch.equal(linear.weight, torch.eye(32)) and not linear.bias.any() and dropout.p == 0.1


def test_usnids_kmeans_goes_on_from_its_centres(tiny_flags, monkeypatch):
    monkeypatch.setattr("baselines.usnid.finish", lambda run, fit, dense: ends.append(fit(run.unit_features(dense=dense))))
    ends, starts = [], []

    def told(z, K, seed, init=None):
        found = kmeans(z, K, seed, init=init)
        starts.append((init, found[0]))
        return found

    monkeypatch.setattr("baselines.usnid.kmeans", told)
    method("usnid", **tiny_flags, pretrain_epochs=1, tolerance=0.0, tag="goes_on")
    assert len(starts) == 3 and starts[0][0] is None and all(
        torch.equal(init, before[1]) for before, (init, _) in itertools.pairwise(starts))


def test_latentems_classifier_goes_on(tiny_flags, monkeypatch):
    run, found = stages("latentem", tiny_flags, monkeypatch)
    heads = found["last"][0]
    known, z = heads["known"], heads["dense"](run.encoder.all_features(run.hidden["train"]))
    cosine = normalize(z, dim=1) @ normalize(run.pre["classifier"], dim=1).T
    share = z.norm(dim=1, keepdim=True) / z.norm(dim=1).mean()
    assert torch.allclose(known(z).detach(), share * cosine / run.pre["config"]["temperature"], atol=1e-4)


@pytest.mark.parametrize("name, lr, corrected", [("gcd", 5e-5, True), ("deepaligned", 5e-5, False), ("clnn", 1e-5, True),
                                                 ("dpn", 1e-5, True), ("latentem", 5e-5, False), ("usnid", 1e-5, False)])
def test_the_optimizer_of_each_method(tiny_flags, monkeypatch, name, lr, corrected):
    run, found = stages(name, tiny_flags, monkeypatch)
    more = found["last"][2]
    assert (more["lr"], more.get("bias_correction", False), more["epochs"], more["batch_size"]) == (lr, corrected, 2, 64)
    if name == "clnn":
        memory = {"epoch": 1}
        more["begin_epoch"](memory, None)
        assert memory["near"].shape == (174, 174 // 8 // 2)  # half the mean class size


def test_confidence_is_the_cosine_to_the_own_centre(tiny_flags):
    method("kmeans", **{k: v for k, v in tiny_flags.items() if k not in ("batch_size", "epochs")}, tag="cosine")
    out = Path(tiny_flags["out_dir"]) / "demo_g4_s0_kmeans_cosine"
    z, cluster, confidence = (torch.from_numpy(np.load(out / f"{name}.npy")).float() for name in (
        "train_feature", "pseudo_label", "confidence"))
    mean = normalize(torch.stack([z[cluster == k].mean(0) for k in range(8)]), dim=1)
    assert torch.allclose(confidence, (z * mean[cluster.long()]).sum(1), atol=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_the_defaults_are_those_of_the_kept_runs_in_full(name):
    args = importlib.import_module(f"baselines.{name}").Args()
    config = json.loads((REPO / f"results/clinc_g10_s0_{name}_full.json").read_text())["config"]
    own = {field.name for field in fields(args)} - {field.name for field in fields(shared.Flags)}
    assert own and {flag: getattr(args, flag) for flag in own} == {flag: config[flag] for flag in own}


def copied_task(flags, **other):
    """The flags of the same rows, and the same pretrain.pt, under another corpus's name or another seed."""
    changed = flags | other
    for folder in (flags["data_dir"], flags["out_dir"]):
        shutil.copytree(Path(folder) / "demo_g4_s0", Path(folder) / f"{changed['dataset']}_g4_s{changed['seed']}",
                        dirs_exist_ok=True)
    path = Path(flags["data_dir"]) / f"{changed['dataset']}_g4_s{changed['seed']}/meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | other))
    return changed


def on_corpus(name, corpus, flags, monkeypatch, **more):
    """(run, heads, batch_loss, the other arguments, memory of the first epoch) of a method's last stage on a corpus."""
    flags = copied_task({key: value for key, value in flags.items() if key != "epochs"}, dataset=corpus)
    run, found = stages(name, flags | more, monkeypatch)
    memory = {"epoch": 1}
    found["last"][2]["begin_epoch"](memory, lambda *_: None)
    return run, *found["last"], memory


@pytest.mark.parametrize("corpus, k, lr", [("clinc", 100, 1e-5), ("banking", 50, 1e-5), ("stackoverflow", 173, 1e-6)])
def test_clnns_settings_of_each_corpus(tiny_flags, monkeypatch, corpus, k, lr):
    for more, wanted in (({}, (lr, k)), ({"lr": 3e-4, "topk": 3}, (3e-4, 3))):  # 173: all other rows, fewer than 500
        *_, given, memory = on_corpus("clnn", corpus, tiny_flags, monkeypatch, **more)
        assert (given["lr"], memory["near"].shape[1]) == wanted


@pytest.mark.parametrize("corpus, epochs, weight", [("clinc", 80, 10), ("banking", 60, 10), ("stackoverflow", 10, 90)])
def test_dpns_settings_of_each_corpus(tiny_flags, monkeypatch, corpus, epochs, weight):
    for more, times in (({}, weight), ({"known_weight": 3.0}, 3)):
        run, heads, batch_loss, given, memory = on_corpus("dpn", corpus, tiny_flags, monkeypatch, n_init=1, **more)
        losses = []
        for known in (True, False):
            torch.manual_seed(1)
            losses.append(batch_loss(ROWS, memory | {"is_known": torch.full_like(memory["is_known"], known)}).detach())
        one = prototype_loss(heads["dense"](features(run, ROWS)), memory["known"], 0.07, "cosine").mean().detach()
        assert float(losses[0] - losses[1]) == pytest.approx(times * float(one), rel=1e-3) and given["epochs"] == epochs


@pytest.mark.parametrize("corpus, lr, tau", [("clinc", 1e-5, 0.1), ("banking", 1e-5, 0.05), ("stackoverflow", 2e-5, 0.05)])
def test_usnids_settings_of_each_corpus(tiny_flags, monkeypatch, corpus, lr, tau):
    for more, (rate, heat) in (({}, (lr, tau)), ({"lr": 3e-4, "tau": 0.7}, (3e-4, 0.7))):
        run, heads, batch_loss, given, memory = on_corpus("usnid", corpus, tiny_flags, monkeypatch, **more)
        loss, y = float(batch_loss(ROWS, memory).detach()), memory["pseudo_label"][ROWS]
        z = heads["dense"](torch.stack([features(run, ROWS, run.views[copy][1]) for copy in (0, 1)], 1))
        expected = (cross_entropy(heads["head"](z).flatten(0, 1), y.repeat_interleave(2))
                    + shared.supervised_contrast(normalize(heads["contrast"](z), dim=2), y, heat))
        assert loss == pytest.approx(float(expected.detach()), rel=1e-4) and given["lr"] == rate


def test_dpns_clusters_are_of_features_of_any_length(tiny_flags, monkeypatch):
    run, found = stages("dpn", tiny_flags | {"n_init": 2}, monkeypatch)
    (heads, _, more), memory = found["last"], {}
    more["begin_epoch"](memory, None)
    z = heads["dense"](run.encoder.all_features(run.hidden["train"])).detach()
    assert torch.equal(memory["cluster"], kmeans(z, run.K, 0, 2)[0])


@pytest.mark.parametrize("name, every", [("gcd", 2), ("clnn", 1), ("usnid", 2)])
def test_a_method_sees_new_views_every_few_epochs(tiny_flags, monkeypatch, name, every):
    _, found = stages(name, tiny_flags, monkeypatch)
    _, batch_loss, more = found["last"]
    memory, losses = {"epoch": 1}, []
    more.get("begin_epoch", lambda *_: None)(memory, lambda *_: None)
    for epoch in range(1, every + 2):
        torch.manual_seed(1)
        losses.append(float(batch_loss(ROWS, memory | {"epoch": epoch}).detach()))
    assert len({*losses[:every]}) == 1 and losses[every] != losses[0]


@pytest.mark.parametrize("name, stage, patience, lr", [("gcd", "last", 20, 5e-5), ("usnid", "pretrain", 10, 5e-5)])
def test_when_a_stage_stops(tiny_flags, monkeypatch, name, stage, patience, lr):
    run, found = stages(name, tiny_flags, monkeypatch)
    heads, _, told = found[stage]
    assert (told["patience"], told["lr"]) == (patience, lr)
    if name == "usnid":
        with torch.no_grad():
            logits = heads["known"](heads["dense"](run.encoder.all_features(run.hidden["dev"])))
        assert told["judge"]({}) == pytest.approx(float(cross_entropy(logits, run.label["dev"])), rel=1e-5)


def test_usnid_contrasts_labelled_rows_with_themselves_under_another_dropout(tiny_flags, monkeypatch):
    run, found = stages("usnid", tiny_flags, monkeypatch)
    heads, _, more = found["last"]
    z = features(run, ROWS)
    assert torch.equal(heads["dense"](z), z), "it starts as the identity, without a tanh"
    steps, memory = [], {"epoch": 1}
    torch.manual_seed(1)
    more["begin_epoch"](memory, lambda loss, rows: steps.append((float(loss.detach()), rows)))
    rows = steps[0][1]
    assert not torch.equal(rows, run.labelled[:len(rows)]), "shuffled"
    torch.manual_seed(1)
    torch.randperm(len(run.labelled))
    for module in (run.encoder, heads["dense"]):
        module.train()
    z = torch.stack([heads["dense"](features(run, rows)) for _ in range(2)], 1)
    expected = shared.supervised_contrast(normalize(heads["contrast"](z), dim=2), run.label["train"][rows], 0.05)
    assert not torch.allclose(z[:, 0], z[:, 1]) and steps[0][0] == pytest.approx(float(expected.detach()), rel=1e-4)


@pytest.mark.parametrize("name, width", [("gcd", 256), ("clnn", 128)])
def test_a_projection_is_not_linear(tiny_flags, monkeypatch, name, width):
    for more in ({}, {"projection": 7}):
        run, found = stages(name, tiny_flags | more, monkeypatch)
        head, z = found["last"][0]["head"], features(run, ROWS)
        assert head(z).shape[1] == more.get("projection", width)
        assert not torch.allclose(head(z) + head(-z), 2 * head(0 * z), atol=1e-4)


def test_deepaligneds_centres_keep_their_numbers(tiny_flags, monkeypatch):
    run, found = stages("deepaligned", {**tiny_flags, "pretrain_epochs": 1}, monkeypatch)
    (heads, _, more), memory = found["last"], {"epoch": 3}
    judge = more["judge"]
    judge(memory)
    assert torch.equal(memory["centre"], kmeans(run.unit_features(dense=heads["dense"]), run.K, 3)[0])
    memory["centre"] = before = memory["centre"].roll(2, 0)
    judge(memory)
    assert torch.allclose(memory["centre"], before, atol=1e-5)


def test_latentem_clusters_the_features_as_they_are(tiny_flags, monkeypatch):
    run, found = stages("latentem", tiny_flags, monkeypatch)
    heads, _, more = found["last"]
    torch.nn.init.orthogonal_(heads["dense"][0].weight)
    memory = {"epoch": 3}
    more["begin_epoch"](memory, None)
    assert torch.equal(memory["cluster"], kmeans(run.unit_features(dense=heads["dense"]), run.K, 3)[1])


@pytest.mark.parametrize("name, more", [(name, {}) for name in NAMES] + [("kmeans", {}), ("kmeans", {"semi_supervised": True})])
def test_the_end_of_each_method(tiny_flags, monkeypatch, name, more):
    """What it hands to finish, without having trained."""
    ends = []
    if name == "kmeans":
        tiny_flags = {key: value for key, value in tiny_flags.items() if key not in ("batch_size", "epochs")}
    else:
        monkeypatch.setattr(f"baselines.{name}.train", lambda run, stage, heads, *_, **__: {"centre": torch.ones(8, 32)})
    monkeypatch.setattr(shared, "train", lambda *_, **__: {})
    monkeypatch.setattr(f"baselines.{name}.finish", lambda *given, **__: ends.append(given))
    starts = {"n_init": 2} if name in ("gcd", "dpn") or more else {}
    method(name, **tiny_flags, **more, **starts, tag="end")
    (run, fit, *dense), = ends
    z, label = normalize(torch.randn(174, 32, generator=torch.Generator().manual_seed(0)), dim=1), run.label["train"]
    expected = (semi_supervised_kmeans(z, label, 8, 6, 0, 2, True) if name == "gcd" or more.get("semi_supervised") else
                torch.ones(8, 32) if name == "deepaligned" else
                kmeans(z, 8, 0, init=torch.ones(8, 32))[0] if name == "usnid" else
                kmeans(z, 8, 0, n_init={"dpn": 2, "kmeans": 3}.get(name, 10))[0])
    assert torch.equal(fit(z), expected) and bool(dense) == (name not in ("gcd", "clnn", "kmeans"))


def test_each_row_of_results_is_what_it_is_called(tiny_flags, monkeypatch, capsys):
    run = stages("gcd", tiny_flags, monkeypatch)[0]
    run.args.seed, run.meta["on_dev"], label = 1, True, run.label["train"]
    monkeypatch.setattr(shared, "semi_supervised_kmeans", semi_supervised_kmeans)  # with all its starts
    dense = torch.nn.Linear(32, 32)  # whose features differ much from the raw ones
    shared.finish(run, lambda z: kmeans(z, run.K, 5)[0], dense, ends=("held",))
    results = json.loads((run.out / "results.json").read_text())
    truth, counts = run.labels["test"], np.load(run.data / "class_counts.npy")
    z = {split: run.unit_features(split, dense) for split in ("train", "test")}
    raw = {split: run.unit_features(split) for split in ("train", "test")}
    expected = {"test": nearest(z["test"], kmeans(z["train"], 8, 5)[0]), "test_kmeans": kmeans(z["test"], 8, 1)[1],
                "test_held": nearest(z["test"], semi_supervised_kmeans(z["train"], label, 8, 6, 1, 100, True)),
                "kmeans_raw": nearest(raw["test"], kmeans(raw["train"], 8, 1, n_init=3)[0]),
                "ss_kmeans_raw": nearest(raw["test"], semi_supervised_kmeans(raw["train"], label, 8, 6, 1))}
    assert {row: results[row] for row in expected} == {
        row: cluster_metrics(truth, found.numpy(), 6, counts) for row, found in expected.items()}
    assert len({results[row]["NMI"] for row in expected}) == 5 and results["on_dev"]
    said = {line[:28].strip(): line[28:].split() for line in capsys.readouterr().out.splitlines()}
    for title, row in (("protocol C", "test"), ("protocol T", "test_kmeans"), ("protocol C, labels held", "test_held"),
                       ("k-means, raw", "kmeans_raw"), ("semi-sup. k-means, raw", "ss_kmeans_raw")):
        assert said[title][0] == f"{results[row]['ACC']:.2f}"


def test_each_epoch_of_each_seed_has_an_order_of_its_own(tmp_path):
    orders = []
    for seed in (0, 1):
        run, seen = toy_run(tmp_path / str(seed), seed, 30), []

        def batch_loss(rows, memory, run=run, seen=seen):
            seen.extend(rows.tolist())
            return run.encoder.trained_layers.weight.sum()

        shared.train(run, "toy", {}, batch_loss, epochs=2, batch_size=10, lr=0.01)
        orders += [tuple(seen[:30]), tuple(seen[30:])]
    assert len({*orders, tuple(range(30))}) == 5 and all(sorted(order) == [*range(30)] for order in orders)


def test_of_equally_good_epochs_the_first_is_kept(tmp_path):
    run, values = toy_run(tmp_path), iter([3.0, 1.0, 1.0, 1.0, 0.0])
    shared.train(run, "toy", {}, lambda rows, memory: run.encoder.trained_layers.weight.sum(), epochs=9, batch_size=2, lr=0.01,
                 judge=lambda memory: next(values), patience=2)
    assert run.epochs == {"toy": 4} and run.kept == {"toy": 2}


def test_another_seed_has_other_heads_and_views_and_labelled_rows_are_drawn(tiny_flags, monkeypatch):
    flags = [tiny_flags, copied_task(tiny_flags, seed=1)]
    runs, found = zip(*(stages("gcd", of_seed, monkeypatch) for of_seed in flags))
    first, second = (stage["last"][0]["head"][0].weight for stage in found)
    assert not torch.equal(first, second)
    assert not torch.equal(*(run.view(1, run.encoder.replace_tokens, 0.5).values[:500] for run in runs))
    assert not torch.equal(*(runs[0].draw_labelled(5).sort().values for _ in range(2)))
