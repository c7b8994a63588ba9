"""The parts of pretrain.py and train_imbanid.py, and the real scripts on a tiny corpus with a tiny encoder."""
import contextlib
import errno
import functools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PATIENCE, REPO, TINY_PRETRAIN, TINY_TRAIN, Started, one_line_error, ranks, read_tsv, script, start_ranks
from safetensors.torch import load_file, save_file
from tiny import make_encoder
from torch.nn.functional import normalize

import pretrain
import train_imbanid
from encoder import Dropout, Encoder, Packed, attend, load_masked_lm, pick_dtype, weights_sha256
from make_lt_data import ThisProcessError, UserError, explain, parse_args, quoted, write_atomic
from metrics import cluster_metrics
from predict import Labeller
from pretrain import locked


def train(task, *flags):
    """Run train_imbanid.py in this process; returns results.json and the predictions."""
    args = parse_args(train_imbanid.Args, [str(word) for word in (*task, *TINY_TRAIN, *flags)])
    train_imbanid.main(args)
    out = task[-1] / ("demo_g4_s0" + (f"_{args.tag}" if args.tag else ""))
    return json.loads((out / "results.json").read_text()), out


@pytest.fixture(scope="module")
def encoder(tiny_encoder):
    return Encoder(str(tiny_encoder), 32, torch.device("cpu"), torch.float32)


TEXTS = ["my card was declined", "balance", "please send forty pounds to my sister before friday if you can", "no signal"]


def test_padding_changes_no_feature(encoder):
    together = encoder.all_features(encoder.trunk(encoder.tokenize(TEXTS)))
    for i, text in enumerate(TEXTS):
        alone = encoder.all_features(encoder.trunk(encoder.tokenize([text])))[0]
        assert torch.allclose(alone, together[i], atol=1e-6)


def test_a_row_whose_tokens_did_not_change_keeps_its_states(encoder):
    tokens = encoder.tokenize(TEXTS)
    changed = Packed(tokens.values.clone(), tokens.offsets)
    changed.values[tokens.offsets[2] + 3] = tokens.values[1]  # a word of the third text
    before = Packed(torch.full((len(tokens.values), encoder.hidden_size), 7.0), tokens.offsets)
    states, whole = encoder.trunk(changed, before=(tokens, before)), encoder.trunk(changed)
    third = tokens.index(torch.tensor([2]))
    assert torch.allclose(states.values[third], whole.values[third], atol=1e-6)
    states.values[third] = 7
    assert (states.values == 7).all() and (encoder.trunk(tokens, before=(tokens, before)).values == 7).all()
    left = tokens.take(torch.arange(1, len(TEXTS)))  # of other lengths, as where tokens were left out: nothing is kept
    assert torch.equal(encoder.trunk(left, before=(tokens, before)).values, encoder.trunk(left).values)


def test_features_are_the_mean_over_all_real_tokens_of_the_whole_model(tiny_encoder, encoder):
    from transformers import AutoModel
    whole = AutoModel.from_pretrained(tiny_encoder).eval()
    batch = encoder.tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = whole(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    mask = batch["attention_mask"][..., None]
    expected = (hidden * mask).sum(1) / mask.sum(1)
    assert torch.allclose(encoder.all_features(encoder.trunk(encoder.tokenize(TEXTS))), expected, atol=1e-5)


def test_only_the_last_layer_and_the_heads_train(encoder):
    trained = {name for name, p in encoder.named_parameters() if p.requires_grad}
    assert trained and all(name.startswith(("trained_layers.", "mlm_head.")) for name in trained)
    assert not any(p.requires_grad for p in encoder._frozen[0].base_model.parameters())
    assert all("decoder.weight" not in name for name in trained), "the tied embedding matrix must stay frozen"


def test_where_the_trunk_ends_changes_what_trains_and_nothing_else():
    found = []
    for trained_layers in (1, 2, 5):
        encoder = Encoder("minilm", 32, torch.device("cpu"), torch.float32, trained_layers=trained_layers).eval()
        tokens = encoder.tokenize(TEXTS)
        target = Packed(torch.where(encoder.special(tokens), -100, tokens.values), tokens.offsets)
        hidden, rows = encoder.trunk(tokens), torch.arange(len(TEXTS))
        torch.manual_seed(0)
        for p in encoder.mlm_head.parameters():  # which minilm comes without
            if p.requires_grad:
                torch.nn.init.normal_(p, std=0.02)
        loss = encoder.mlm_loss(hidden, rows, target)[0]
        (encoder.features(hidden, rows).square().sum() + loss).backward()
        assert len(encoder.trained_layers) == trained_layers
        assert all(p.grad is not None and p.grad.any() for layer in encoder.trained_layers for p in layer.parameters()
                   if p.numel() > 384 or p.dim() > 1)
        found.append(torch.cat([encoder.all_features(hidden).flatten(), loss.detach()[None]]))
    assert torch.allclose(found[0], found[1], atol=1e-5) and torch.allclose(found[0], found[2], atol=1e-5)


def test_two_layers_train_from_the_first_stage_to_the_last(tiny_run, tiny_encoder, tmp_path):
    from transformers import BertConfig, BertForMaskedLM
    shutil.copytree(tiny_encoder, tmp_path / "encoder")
    BertForMaskedLM(BertConfig.from_pretrained(tiny_encoder, num_hidden_layers=3)).save_pretrained(tmp_path / "encoder")
    task = *tiny_run[0][:-1], tmp_path / "out"
    words = *task, "--encoder", tmp_path / "encoder", *TINY_PRETRAIN, "--trained_layers"
    for wrong in (0, 3):
        one_line_error(script("pretrain.py", *words, wrong, ok=False), f"--trained_layers {wrong}", "3 layer(s)")
    script("pretrain.py", *words, 2)
    script("train_imbanid.py", *task, *TINY_TRAIN)
    run = tmp_path / "out/demo_g4_s0"
    start = dict(Encoder(str(tmp_path / "encoder"), 32, torch.device("cpu"), torch.float32, trained_layers=2)
                 .trained_layers.named_parameters())
    states = [torch.load(run / name, weights_only=True)["trained_layers"] for name in ("pretrain.pt", "last.pt")]
    for name in ("0.attention.self.query.weight", "1.output.dense.weight"):
        assert not torch.equal(start[name], states[0][name]) and not torch.equal(*(state[name] for state in states))
    (tmp_path / "new.csv").write_text("text\nno signal\n")
    script("predict.py", run, "--data_dir", tiny_run[1] / "data")
    script("predict.py", run, tmp_path / "new.csv", "-o", tmp_path / "labelled.csv", "--data_dir", tiny_run[1] / "data")
    assert len((tmp_path / "labelled.csv").read_text().splitlines()) == 2
    one_line_error(script("-m", "baselines.clnn", *task, "--encoder", tmp_path / "encoder", "--max_length", 32, ok=False),
                   "made with --trained_layers 2")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_drops_its_share_and_keeps_the_mean(dtype):
    """A seventh of the elements, whichever of the four places of a drawn word theirs is, the same again by the same seed."""
    part, x = Dropout(1 / 7), torch.full((100, 1999), 2.0, dtype=dtype, requires_grad=True)
    torch.manual_seed(0)
    y = part(x)
    torch.manual_seed(0)
    assert torch.equal(part(x), y) and not torch.equal(part(x), y)
    dropped = (y == 0).flatten().float()
    for place in range(4):
        assert abs(float(dropped[place::4].mean()) - 1 / 7) < 0.01
    assert torch.allclose(y[y > 0], torch.tensor(7 / 3, dtype=dtype), rtol=0.01)
    y.sum().backward()
    assert torch.equal(x.grad == 0, y == 0)
    assert part.eval()(x) is x
    assert torch.equal(Dropout(0.0)(x), x) and not Dropout(1.0)(x).any()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("b, L, m", [(1, 2, 0), (3, 7, 0), (40, 20, 0), (2, 33, 0), (3, 7, 2), (40, 20, 1)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_attention_in_training_is_torchs_own(monkeypatch, with_bias, b, L, m, dtype, tolerance):
    torch.manual_seed(0)
    q, kv = (torch.randn(b, n, *more, 4, 16).to(dtype).requires_grad_() for n, more in ((m or L, ()), (L, (2,))))
    bias = torch.randn(4, m or L, L) if with_bias else None
    monkeypatch.setattr("encoder.drawn_for", lambda x, p: torch.ones(()))  # torch's kernel draws others
    ours = attend(q, kv, Dropout(0.1), bias)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(x.float().transpose(1, 2) for x in (q, *kv.unbind(2))), bias).transpose(1, 2)
    assert ours.dtype == dtype and torch.allclose(ours.float(), theirs, atol=tolerance)
    gradients = [torch.autograd.grad(y.float().square().sum(), (q, kv)) for y in (ours, theirs)]
    assert all(torch.allclose(one.float(), other.float(), atol=tolerance) for one, other in zip(*gradients, strict=True))


def test_attention_drops_weights():
    """With the unit vectors as values the output is the weights: those that stay are all larger by the same factor."""
    torch.manual_seed(0)
    q, kv = torch.randn(50, 16, 4, 16), torch.randn(50, 16, 2, 4, 16)
    kv[:, :, 1] = torch.eye(16)[:, None]
    part = Dropout(0.25)
    dropped, whole = attend(q, kv, part), attend(q, kv, part.eval())
    assert abs(float((dropped == 0).float().mean()) - 0.25) < 0.01
    assert torch.allclose(dropped[dropped > 0], whole[dropped > 0] / 0.75, rtol=1e-4)


@pytest.mark.parametrize("mpnet", [False, True])
def test_the_kept_tokens_alone_come_out_as_among_all(monkeypatch, tmp_path, mpnet):
    """None, one or several of a text, long or short, the whole last layer; and its gradients."""
    make_encoder(tmp_path, mpnet=mpnet)
    encoder = Encoder(str(tmp_path), 64, torch.device("cpu"), torch.float32).train()
    monkeypatch.setattr("encoder.drawn_for", lambda x, p: torch.ones(()))
    if mpnet:
        encoder._bias += torch.randn(encoder._bias.shape, generator=torch.Generator().manual_seed(0))
    tokens = encoder.tokenize([*TEXTS, "open the door", "open the door", "turn off the light " * 8, "no", "yes"])
    rows = torch.arange(len(tokens))
    for share in (0.0, 0.1, 0.5, 1.0):
        wanted = torch.rand(len(tokens.values), generator=torch.Generator().manual_seed(1)) < share
        target = Packed(torch.where(wanted, torch.arange(len(wanted)), -100), tokens.offsets)
        found = []
        for all_rows in (None, target):
            (_, states, _, ids), = encoder.trained_out(encoder.trunk(tokens), rows, all_rows)
            if ids is None:
                order = tokens.index(tokens.by_length(rows)[0])
                states, ids = states[wanted[order]], order[wanted[order]]
            encoder.zero_grad()
            (states * torch.arange(1, 1 + encoder.hidden_size)).sum().backward()
            found.append((ids, states, [p.grad for p in encoder.trained_layers.parameters() if p.grad is not None]))
        assert torch.equal(found[0][0], found[1][0]) and torch.allclose(found[0][1], found[1][1], atol=1e-5)
        assert share == 0 or all(torch.allclose(one, other, rtol=1e-3, atol=1e-3) for one, other in zip(
            found[0][2], found[1][2], strict=True))


def test_texts_without_a_word_to_guess_do_not_run(monkeypatch, encoder):
    tokens = encoder.tokenize(TEXTS)
    target = Packed(torch.full_like(tokens.values, -100), tokens.offsets)
    target.values[tokens.offsets[3] + 2] = tokens.values[tokens.offsets[3] + 2]
    hidden, ran = encoder.trunk(tokens), []
    run_layer = encoder.run_layer
    monkeypatch.setattr(encoder, "run_layer", lambda layer, x, *more: (ran.append(len(x)), run_layer(layer, x, *more))[1])
    loss, count = encoder.mlm_loss(hidden, torch.tensor([3, 0, 1]), target)
    assert count == 1 and ran == [int(tokens.lengths[3])] and loss > 0
    assert encoder.mlm_loss(hidden, torch.tensor([0, 1]), target) == (0, 0)


def test_rows_are_taken_in_chunks_of_so_many_tokens(monkeypatch):
    monkeypatch.setattr("encoder.CHUNK", 100)
    lengths = torch.tensor([30, 2, 90, 7, 120, 7, 64, 5, 33, 250])
    packed = Packed(torch.zeros(int(lengths.sum())), torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))
    rows = torch.tensor([9, 4, 3, 1, 0, 2, 8, 7, 6])
    chunks = packed.by_length(rows)
    taken = lengths[rows[torch.cat(chunks)]]
    assert sorted(torch.cat(chunks).tolist()) == list(range(9)) and torch.equal(taken, taken.sort()[0])
    assert all(int(lengths[rows[part[1:]]].sum()) < 100 for part in chunks) and len(chunks) < len(rows)
    assert [len(part) for part in packed.by_length(rows[:0])] == [0]


def test_augmentations_leave_special_tokens_alone(encoder):
    tokens = encoder.tokenize(TEXTS * 50)
    special = encoder.special(tokens)
    replaced = encoder.replace_tokens(tokens, 0.25, torch.Generator().manual_seed(0))
    changed = replaced.values != tokens.values
    assert not changed[special].any() and 0.2 < changed[~special].float().mean() < 0.3
    masked, target = encoder.mask_tokens(tokens, torch.Generator().manual_seed(0))
    wanted = target.values >= 0
    assert not wanted[special].any() and 0.1 < wanted[~special].float().mean() < 0.2
    assert torch.equal(target.values[wanted], tokens.values[wanted])
    share = (masked.values[wanted] == encoder.tokenizer.mask_token_id).float().mean()
    assert 0.6 < share < 0.95 and torch.equal(masked.values[~wanted], tokens.values[~wanted])


def test_results_file_and_arrays(tiny_run):
    results, out = train(tiny_run[0])
    N, M, K = len(np.load(out / "pseudo_label.npy")), len(np.load(out / "test_pred.npy")), 8
    assert results["num_classes"] == K and np.load(out / "beta.npy").shape == (K,)
    assert np.load(out / "test_feature.npy").shape == (M, 32) and np.load(out / "confidence.npy").shape == (N,)
    columns = {"ACC", "NMI", "ARI", "known", "novel", "head", "medium", "tail", "per_class_mean"}
    for row in ("test", "test_kmeans", "kmeans_raw", "ss_kmeans_raw", "kmeans_pretrained"):
        assert set(results[row]) == columns and all(0 <= results[row][c] <= 100 for c in columns - {"ARI"})
    assert {"dataset", "gamma", "seed", "method", "encoder", "epochs", "seconds", "peak_memory_mb", "config", "commit",
            "versions"} <= set(results)
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in log] == [1, 2] and all(math.isfinite(v) for line in log for v in line.values())
    assert all(line["rot_residual"] <= 1e-6 for line in log)
    label = np.load(tiny_run[1] / "data/demo_g4_s0/train_label.npy")
    assert np.array_equal(np.load(out / "pseudo_label.npy")[label >= 0], label[label >= 0]), "labelled rows keep their labels"
    assert (np.load(out / "confidence.npy")[label >= 0] == 1).all()
    assert not list(out.glob("*.part"))
    torch.load(out / "last.pt", weights_only=True)


LOW = ("--tau_g", 0.2, "--rho", 0.3)  # the tiny model is confident of nothing: at 0.9 QR selects no row
WEAK = ("--lambda2", 0.05, "--temperature", 0.02)  # where rot and eot pull tail classes differently
SWITCHES = [("--pseudo_label", "cot"), WEAK, ("--pseudo_label", "eot", *WEAK), ("--pseudo_label", "mot"),
            ("--pseudo_label", "mot", "--mu", 0.1), ("--pseudo_label", "kmeans"), ("--no_dr", *LOW), ("--no_qr", *LOW),
            ("--no_dr", "--no_qr"), LOW, ("--no_adaptive_weight",), ("--no_cwcl",), ("--no_iwcl",), ("--omega", 0.9),
            ("--lambda1", 1.0), ("--lambda2", 0.1), ("--rho", 0.1), ("--tau", 0.5), ("--temperature", 0.2),
            ("--replace_rate", 0.6), ("--view_epochs", 1), ("--kappa", 3.0), ("--label_weight", 1.0), ("--max_steps", 1),
            ("--no_class_sizes",), ("--num_classes", 13), ("--num_classes", "auto"),
            ("--num_classes", "appendix_e", "--max_classes", 12, "--min_cluster", 3),
            ("--swaps", 0, "--num_classes", 13)]  # of few novel centres none may find a better place


def test_every_switch_changes_the_run(tiny_run, monkeypatch):
    """Each flag gives another model than the defaults and than every other flag: none is read by nothing."""
    estimate = train_imbanid.estimate_num_classes
    monkeypatch.setattr(train_imbanid, "estimate_num_classes", lambda *of: max(9, estimate(*of)))  # 8, the truth, on some CPUs
    seen, same = {}, []
    for i, switch in enumerate([(), *SWITCHES]):
        _, out = train(tiny_run[0], *switch, "--tag", f"switch{i}")
        state = torch.load(out / "last.pt", weights_only=True)
        digest = hash((state["head"].numpy().tobytes(), *(v.numpy().tobytes() for v in state["trained_layers"].values())))
        if digest in seen:
            same.append((switch, seen[digest]))
        seen[digest] = switch
    assert not same


def test_hidden_labels_change_no_byte_of_the_model(tiny_run, tiny_encoder, tmp_path):
    task, folder = tiny_run
    _, first = train(task, "--tag", "seen")
    data = shutil.copytree(folder / "data", tmp_path / "data") / "demo_g4_s0"
    for name in ("train_truth", "test_label", "class_counts"):
        np.save(data / f"{name}.npy", np.roll(np.load(data / f"{name}.npy"), 7))
    task = (*task[:-3], tmp_path / "data", "--out_dir", tmp_path / "out")
    script("pretrain.py", *task, "--encoder", tiny_encoder, *TINY_PRETRAIN)
    _, second = train(task)
    for name in ("pseudo_label.npy", "test_pred.npy", "test_feature.npy", "beta.npy", "confidence.npy"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_a_damaged_cache_of_the_kmeans_rows_is_made_anew(tiny_run):
    task, folder = tiny_run
    first, _ = train(task, "--tag", "rows", "--epochs", 1)
    pre = first["config"]["pretrain"]
    cache, = (folder / "out/demo_g4_s0").glob(f"kmeans_8_{first['config']['dtype']}_*.npy")  # another test may have both types
    assert cache.stem.endswith(f"{pre['weights']}_{pre['data'][:8]}")  # or the next pre-training would find its rows
    whole = cache.read_bytes()
    cache.write_bytes(whole[:100])
    second, _ = train(task, "--tag", "rows_again", "--epochs", 1)
    assert cache.read_bytes() == whole and second["ss_kmeans_raw"] == first["ss_kmeans_raw"]


@pytest.mark.parametrize("P, pseudo_label", [(2, "rot"), (4, "rot"), (4, "kmeans")])  # 174 rows: 4 does not divide them
def test_several_processes_give_what_one_gives(tiny_run, P, pseudo_label):
    """Under torchrun each process holds every P-th row and draws its own dropout, which a tiny learning rate makes harmless."""
    task = tiny_run[0]
    flags = ("--epochs", 1, "--pseudo_label", pseudo_label, "--restart", "--lr", 1e-12, "--head_lr", 1e-12)
    one, first = train(task, "--tag", f"one{P}", *flags)
    script("train_imbanid.py", *task, *TINY_TRAIN, *flags, "--tag", f"P{P}", nproc=P)
    second = first.with_name(f"demo_g4_s0_P{P}")
    several = json.loads((second / "results.json").read_text())
    assert several["processes"] == P
    for name in ("pseudo_label.npy", "test_pred.npy"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    a, b = (json.loads((p / "log.jsonl").read_text()) for p in (first, second))
    for key in ("clean", "confidence", "beta_max", "beta_min", "dev_accuracy"):
        assert a[key] == pytest.approx(b[key], rel=1e-3)
    assert one["kmeans_raw"] == several["kmeans_raw"]
    assert one["test"] == several["test"]


def test_stage_3_on_several_processes_is_that_on_one(tiny_run, calm_encoder, tmp_path, monkeypatch):
    """All draw the same batches; so does a run that was stopped within an epoch and goes on on another number of them."""
    task, save = (*tiny_run[0][:-1], tmp_path / "out"), train_imbanid.save_checkpoint
    script("pretrain.py", *task, "--encoder", calm_encoder, *TINY_PRETRAIN)
    flags = ("--epochs", 2, "--replace_rate", 0, "--batch_size", 16)  # 11 batches an epoch
    ends = [train(task, *flags, "--tag", "P1")[1]]

    def stop(path, **state):
        save(path, **state)
        if state["epoch"] == 1 and state["step"] == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pretrain, "SAVE_STEPS", 4)
        patched.setattr(train_imbanid, "save_checkpoint", stop)
        with pytest.raises(KeyboardInterrupt):
            train(task, *flags, "--tag", "P1_3")
    for tag, P in (("P2", 2), ("P4", 4), ("P1_3", 3)):
        said = script("train_imbanid.py", *task, *TINY_TRAIN, *flags, "--tag", tag, nproc=P).stdout
        assert ("after epoch 1 and 4 batches" in said) == (tag == "P1_3")
        ends.append(tmp_path / f"out/demo_g4_s0_{tag}")
    logs = [[json.loads(line) for line in (end / "log.jsonl").read_text().splitlines()] for end in ends]
    saved = [torch.load(end / "last.pt", weights_only=True) for end in ends]
    for log, state in zip(logs[1:], saved[1:]):
        for line, other in zip(logs[0], log, strict=True):
            for key in ("contrastive", "ce", "clean", "confidence", "dev_accuracy"):
                assert line[key] == pytest.approx(other[key], rel=1e-4), key
        for name, value in (saved[0]["trained_layers"] | {"": saved[0]["head"]}).items():
            assert torch.allclose((state["trained_layers"] | {"": state["head"]})[name], value, atol=1e-4), name


def test_what_stage_3_hands_from_epoch_to_epoch(tiny_run, monkeypatch):
    """The labelled rows to DR and QR, the potential to the next transport, and the steps of a cosine to the optimizer."""
    task, folder = tiny_run
    starts, rates, labelled = [], [], []

    def listened(told, of, *given, **more):
        told(*given, **more)
        return of(*given, **more)

    for module, name, told in (
            (train_imbanid, "relaxed_ot", lambda *_, init, **__: starts.append(init)),
            (train_imbanid, "select_clean", lambda *given: labelled.append(given[-1])),
            (pretrain, "joint_step", lambda _, optimizer, *__: rates.append([g["lr"] for g in optimizer.param_groups]))):
        monkeypatch.setattr(module, name, functools.partial(listened, told, getattr(module, name)))
    words = (*task, *TINY_TRAIN, "--epochs", 3, "--tag", "handed_on")
    train_imbanid.main(parse_args(train_imbanid.Args, [str(word) for word in words]))
    given = torch.from_numpy(np.load(folder / "data/demo_g4_s0/train_label.npy")) >= 0
    assert len(labelled) == 3 and all(torch.equal(rows, given) for rows in labelled)
    assert starts[0] is None and all(start.abs().sum() > 0 for start in starts[1:]) and len(starts) == 4
    steps = len(rates)
    assert steps == 9
    for n, (lr, head_lr) in enumerate(rates):
        assert (lr, head_lr) == pytest.approx(tuple(top * (0.5 + 0.5 * math.cos(math.pi * n / steps)) for top in (0.001, 0.01)))


def test_two_processes_give_the_same_bytes_again(tiny_run):
    task, folder = tiny_run
    for tag in ("again1", "again2"):
        script("train_imbanid.py", *task, *TINY_TRAIN, "--epochs", 1, "--tag", tag, nproc=2)
    first, second = (folder / f"out/demo_g4_s0_{tag}" for tag in ("again1", "again2"))
    for name in ("pseudo_label.npy", "test_pred.npy", "test_feature.npy", "beta.npy", "confidence.npy", "log.jsonl"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def on_two_nodes(*words, flags=()):
    """What two torchrun with README's --nnodes flags, both on this machine, say and how they end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", *flags,
               "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", *map(str, words)]
    nodes = [subprocess.Popen(command, env={**os.environ, "NODE": str(n)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True) for n in range(2)]
    try:
        said = [node.communicate(timeout=PATIENCE) for node in nodes]
    finally:
        for node in nodes:
            node.terminate()  # torchrun ends its processes
    assert [node.returncode for node in nodes] == [0, 0], said
    return said


def test_two_nodes(tiny_run):
    """README's --nnodes command with out/ shared, as it asks."""
    task, folder = tiny_run
    words = (*task, *TINY_TRAIN, "--epochs", "1", "--tag")
    on_two_nodes(REPO / "train_imbanid.py", *words, "nodes")
    script("train_imbanid.py", *words, "node", nproc=2)
    two, one = (folder / f"out/demo_g4_s0_{tag}" for tag in ("nodes", "node"))
    assert json.loads((two / "results.json").read_text())["processes"] == 2
    for name in ("pseudo_label.npy", "test_pred.npy"):
        assert (two / name).read_bytes() == (one / name).read_bytes()


ANOTHER_JOB = """
import os, sys, time, torch
sys.path.insert(0, {repo!r})
from make_lt_data import UserError
from pretrain import start_processes
try:
    start_processes(torch.device("cpu"), {{"dtype": "float32", "batch_size": 64 + int(os.environ["RANK"])}})
except UserError as err:
    print(err, flush=True)
    time.sleep(2 * (os.environ["RANK"] == "0"))  # without torchrun the store that both read is this process's
"""


def test_nodes_with_another_command_are_told_so_at_once(tmp_path):
    (tmp_path / "job.py").write_text(ANOTHER_JOB.format(repo=str(REPO)))
    said = ranks([tmp_path / "job.py"], 2).stdout
    assert said.count("started with another batch_size than process 0: every node needs the same command") == 2


DIES_ONCE = """
import os, sys, time, torch
sys.path.insert(0, {repo!r})
from pretrain import start_processes, sum_over_ranks
start_processes(torch.device("cpu"), {{}})
node = os.environ["NODE"]
if not os.path.exists(node):
    open(node, "w").close()
    if node == "1":
        os._exit(9)
    time.sleep({patience})   # busy, so that it does not notice, and its torchrun counts no failure
print("sum", sum_over_ranks(torch.ones(1)).item(), "restarts", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
os._exit(0)
"""


def test_two_nodes_find_each_other_after_a_restart_that_only_one_of_them_counts(tmp_path, monkeypatch):
    (tmp_path / "dies_once.py").write_text(DIES_ONCE.format(repo=str(REPO), patience=PATIENCE))
    monkeypatch.chdir(tmp_path)
    said = on_two_nodes("dies_once.py", flags=("--max_restarts", "1"))
    assert ["sum 2.0 restarts 0" in said[0][0], "sum 2.0 restarts 1" in said[1][0]] == [True, True], said


SAME_BATCH = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, {repo!r})
import pretrain, train_imbanid
from encoder import Encoder
from pretrain import sum_over_ranks
torch.set_num_threads(1)
encoder = Encoder({encoder!r}, 32, torch.device("cpu"), torch.float32).eval()   # eval: dropout differs between processes
texts = ["pay " + "my bill " * (i % 5) + str(i) for i in range(9)]
tokens = encoder.tokenize(texts)
view = encoder.trunk(encoder.replace_tokens(tokens, 0.5, torch.Generator().manual_seed(0)))
hidden = encoder.trunk(tokens)
torch.manual_seed(0)
head, classifier = (torch.nn.Parameter(torch.randn(4, 32)) for _ in range(2))
label, confidence, clean = torch.arange(9) % 4, torch.rand(9), torch.rand(9) > 0.2
parameters = [head, classifier, *encoder.trained_layers.parameters()]
masked, target = encoder.mask_tokens(tokens, torch.Generator().manual_seed(0))
masked, drawn = encoder.trunk(masked), torch.tensor([3, 8, 8, 0, 1])

def stage_3(n, rank, world):
    rows = torch.arange(n)[rank::world]
    return train_imbanid.batch_loss(encoder, head, hidden, view, rows, label, confidence, clean, train_imbanid.Args())[0]

def stage_1(n, rank, world):   # in which a process holds its own rows alone
    own = torch.arange(9)[rank::world]
    return sum(pretrain.batch_loss(encoder, classifier, hidden.take(own), masked.take(own), target.take(own), label,
                                   torch.arange(n), drawn[:n], pretrain.Args(), rank, world))

def run(loss_of, n, rank=0, world=1):   # the loss and each parameter's gradient, over all processes
    for p in parameters:
        p.grad = None
    loss = loss_of(n, rank, world)
    if loss.requires_grad:
        loss.backward()
    return [sum_over_ranks(x.clone()) for x in (loss.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad
                                                                 for p in parameters))]

tasks = [(loss_of, n) for loss_of in (stage_3, stage_1) for n in (9, 5, 2, 1)]   # also fewer rows than processes
whole = [run(*task) for task in tasks]
assert all(sum(bool(g.abs().max() > 1e-4) for g in gradients) > 10 for _, *gradients in whole[::4])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for task, parts in zip(tasks, whole):
    for found, expected in zip(run(*task, rank, world), parts, strict=True):   # the bias of keys has a gradient of 0
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max() + 1e-8, (task, found, expected)
dist.destroy_process_group()
print("same")
"""


@pytest.mark.parametrize("P", [2, 4])
def test_pretraining_on_several_processes_is_that_on_one(tiny_run, calm_encoder, tmp_path, P):
    for flags in (("--no_mlm",), ()):
        found = []
        for n in (1, P):
            out = tmp_path / f"out{n}{len(flags)}"
            script("pretrain.py", *tiny_run[0], *TINY_PRETRAIN, *flags, "--encoder", calm_encoder, "--out_dir", out,
                   nproc=n if n > 1 else None)
            found.append(torch.load(out / "demo_g4_s0/pretrain.pt", weights_only=True))
        one, several = found
        if flags:
            for name, value in (one["trained_layers"] | {"": one["classifier"]}).items():
                assert torch.allclose((several["trained_layers"] | {"": several["classifier"]})[name], value, atol=1e-5)
        for line, other in zip(one["log"], several["log"], strict=True):  # each process draws the masks of its rows
            assert line["mlm"] == pytest.approx(other["mlm"], rel=0.05)
            assert line["dev_loss"] == pytest.approx(other["dev_loss"], rel=0.02)


def test_a_table_without_labels_on_two_processes(tiny_encoder, tmp_path):
    """No labelled row, no dev row, and a number of rows that is odd."""
    rows = [row[0] for row in read_tsv(REPO / "data/raw/demo/train.tsv")[1:42]]
    (tmp_path / "notes.csv").write_text("text\n" + "".join(f'"{text}"\n' for text in rows), encoding="utf-8")
    folders = ("--data_dir", tmp_path / "data", "--out_dir", tmp_path / "out")
    script("make_lt_data.py", "--dataset", tmp_path / "notes.csv", *folders[:2])
    task = ("--dataset", "notes", *folders)
    script("pretrain.py", *task, *TINY_PRETRAIN, "--encoder", tiny_encoder, nproc=2)
    script("train_imbanid.py", *task, *TINY_TRAIN, "--num_classes", 4, nproc=2)
    assert np.load(tmp_path / "out/notes_s0/pseudo_label.npy").shape == (41,)
    one_line_error(script("pretrain.py", *task, *TINY_PRETRAIN, "--encoder", tiny_encoder, "--no_mlm", ok=False), "--no_mlm")


def test_a_language_model_head_that_is_drawn_is_drawn_by_the_seed(tiny_run, tiny_encoder, tmp_path):
    from transformers import AutoModelForMaskedLM
    headless = shutil.copytree(tiny_encoder, tmp_path / "headless")
    AutoModelForMaskedLM.from_pretrained(tiny_encoder).base_model.save_pretrained(headless)
    found = []
    for before in (1, 2):  # whatever was drawn in this process
        torch.manual_seed(before)
        flags = (*tiny_run[0], *TINY_PRETRAIN, "--encoder", headless, "--out_dir", tmp_path / str(before))
        pretrain.main(parse_args(pretrain.Args, [str(word) for word in flags]))
        found.append(torch.load(tmp_path / f"{before}/demo_g4_s0/pretrain.pt", weights_only=True))
    for part in ("trained_layers", "mlm_head"):
        assert all(torch.equal(value, found[1][part][name]) for name, value in found[0][part].items())


@pytest.mark.parametrize("P", [2, 4])
def test_a_batch_has_the_same_loss_and_gradient_on_any_number_of_processes(tiny_encoder, tmp_path, P):
    (tmp_path / "check.py").write_text(SAME_BATCH.format(repo=str(REPO), encoder=str(tiny_encoder)))
    done = ranks([tmp_path / "check.py"], P)
    assert done.returncode == 0 and done.stdout.count("same") == P, done.stderr


def test_cached_uncached_and_mapped_features_agree(tiny_run, calm_encoder, tmp_path, monkeypatch):
    task, calls = tiny_run[0], []

    def counted(owner, name):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **named: calls.append(name) or real(*given, **named))

    def calls_of(tag, *flags):
        calls.clear()
        return train(task, "--tag", tag, *flags)[1], calls.count("from_file"), calls.count("trunk")

    counted(torch, "from_file")
    counted(Encoder, "trunk")
    cached, files, passes = calls_of("cached")
    mapped, mapped_files, mapped_passes = calls_of("mapped", "--cache_gb", 1e-6)
    assert files == 0 < mapped_files and mapped_passes == passes
    for name in ("test_pred.npy", "pseudo_label.npy", "test_feature.npy"):
        assert (cached / name).read_bytes() == (mapped / name).read_bytes()
    assert not [p for p in mapped.iterdir() if p.suffix not in (".npy", ".json", ".jsonl", ".pt")], "a scratch file stayed"
    uncached, files, uncached_passes = calls_of("uncached", "--no_cache")
    assert files == 0 and uncached_passes > 2 * passes
    assert np.allclose(np.load(cached / "test_feature.npy"), np.load(uncached / "test_feature.npy"), atol=1e-3)
    logs = []
    for place, flags in (("kept", ()), ("anew", ("--no_cache",))):
        out = tmp_path / place
        words = (*task[:-1], out, "--encoder", calm_encoder, *TINY_PRETRAIN, *flags)
        pretrain.main(parse_args(pretrain.Args, [str(word) for word in words]))
        logs.append([[*line.values()] for line in torch.load(out / "demo_g4_s0/pretrain.pt", weights_only=True)["log"]])
    assert np.allclose(*logs, rtol=1e-4)


def test_an_infinite_loss_of_finite_gradients_takes_no_step():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.5)
    with pytest.raises(UserError, match=r"not finite in here, at lr 5.0e-01.*batch: \[4, 7\]"):
        pretrain.joint_step(p.sum() + math.inf, optimizer, "here", torch.tensor([7, 4]))
    assert p.tolist() == [1, 1, 1]
    assert pretrain.joint_step(p.sum(), optimizer, "", torch.zeros(1)) is False and p.max() < 1
    assert pretrain.joint_step(p.sum(), optimizer, "", torch.zeros(1), [signal.SIGTERM]) is True


@pytest.mark.parametrize("name", ["pretrain.py", "train_imbanid.py"])
def test_a_loss_that_is_not_finite_says_where(tiny_run, tiny_encoder, tmp_path, name):
    task, folder = tiny_run
    flags = ("--tag", "nan") if name == "train_imbanid.py" else ("--encoder", tiny_encoder, "--out_dir", tmp_path)
    settings = TINY_TRAIN if name == "train_imbanid.py" else TINY_PRETRAIN
    done = script(name, *task, *settings, *flags, "--lr", 1e30, "--head_lr", 1e30, ok=False)
    one_line_error(done, "not finite", "epoch 1", "step", "lr", "Training rows of the batch: [")
    # One step an epoch: its gradient is finite, what it leaves is not.
    flags += ("--lr", 1e30, "--head_lr", 1e30, "--batch_size", 4096, "--epochs", 1)
    done = script(name, *task, *settings, *flags, ok=False)
    one_line_error(done, "a weight of", "after epoch 1", "at lr 1.0e+30 and 1.0e+30: try a smaller --lr or --head_lr, or")
    assert not (folder / "out/demo_g4_s0_nan/last.pt").exists() and not list(tmp_path.rglob("*.pt"))


def test_skip_refuse_and_restart(tiny_run, tmp_path, monkeypatch, capsys):
    task = tiny_run[0]
    out = train(task, "--tag", "again")[1]
    capsys.readouterr()
    train(task, "--tag", "again")
    said = capsys.readouterr().out
    assert "skipped" in said and "by code of" not in said and "everything is in" in said
    (out / "beta.npy").rename(out / "aside")
    train(task, "--tag", "again")
    (out / "aside").rename(out / "beta.npy")
    assert f"{out}/ lacks beta.npy: to make it again remove {out}/results.json and last.pt" in capsys.readouterr().out
    config = json.loads((out / "results.json").read_text())["config"]
    write_atomic(tmp_path / "results.json", json.dumps({"method": "imbanid", "commit": "abc", "config": config}))
    monkeypatch.setattr(train_imbanid, "commit", lambda: "def")
    assert train_imbanid.read_finished(tmp_path, config, train_imbanid.Args())
    assert "by code of commit abc, this is def" in capsys.readouterr().out
    one_line_error(script("train_imbanid.py", *task, *TINY_TRAIN, "--tag", "again", "--omega", 0.3, ok=False), "omega", "--tag")
    one_line_error(script("train_imbanid.py", *task, *TINY_TRAIN, "--tag", "again", "--dtype", "bfloat16", ok=False), "dtype")
    assert train(task, "--tag", "again", "--omega", 0.3, "--restart")[0]["config"]["omega"] == 0.3
    first, out = train(task, "--tag", "again", "--omega", 0.3)
    (out / "results.json").unlink()  # as if it had been killed after its last epoch
    spent = train(task, "--tag", "again", "--omega", 0.3)[0]["seconds"]
    assert all(spent[stage] > first["seconds"][stage] for stage in ("features", "seeding"))
    one_line_error(script("train_imbanid.py", *task, *TINY_TRAIN, "--tag", "k50", ok=False), "--tag k50", "other ratios")
    train_imbanid.check_flags(train_imbanid.Args(dataset="tickets.csv", tag="k50"))  # whose folders name no ratio


@pytest.mark.parametrize("name", ["pretrain.py", "train_imbanid.py"])
def test_a_second_run_in_the_same_folder_is_told_so(tiny_run, tiny_encoder, tmp_path, name):
    pre, out = tiny_run[1] / "out/demo_g4_s0/pretrain.pt", tmp_path / "demo_g4_s0"
    task, flags = (*tiny_run[0][:-1], tmp_path), (*TINY_PRETRAIN, "--encoder", tiny_encoder)
    out.mkdir()
    if name == "train_imbanid.py":
        shutil.copy(pre, out)
        flags = TINY_TRAIN
    with locked(out) as free:
        assert free
        one_line_error(script(name, *task, *flags, ok=False), "another run is writing to", "--tag")
        one_line_error(script(name, *task, *flags, ok=False, nproc=2), "another run is writing to", "--tag")
    script(name, *task, *flags)


def test_the_kmeans_rows_of_another_test_set_are_not_taken(tiny_run, tmp_path):
    """They are kept for the next --tag; training does not read the test texts, so its weights do not tell."""
    data, out = tmp_path / "data/demo_g4_s0", tmp_path / "out/demo_g4_s0"
    shutil.copytree(tiny_run[1] / "data/demo_g4_s0", data)
    out.mkdir(parents=True)
    shutil.copy(tiny_run[1] / "out/demo_g4_s0/pretrain.pt", out)
    task = (*tiny_run[0][:-3], tmp_path / "data", "--out_dir", tmp_path / "out")
    train(task, "--tag", "one")
    kept, = out.glob("kmeans_*.npy")
    rows = (data / "test.tsv").read_text().splitlines(keepends=True)
    (data / "test.tsv").write_text("".join(rows[:-4]))
    np.save(data / "test_label.npy", np.load(data / "test_label.npy")[:-4])
    pre = pretrain.load_checkpoint(out / "pretrain.pt")  # what training it anew gives
    pretrain.save_checkpoint(out / "pretrain.pt", **pre | {"config": pre["config"] | {
        "data": pretrain.data_fingerprint(data)}})
    train(task, "--tag", "two")
    again, = set(out.glob("kmeans_*.npy")) - {kept}
    assert np.load(again).shape[1] == np.load(kept).shape[1] - 4


def test_a_pre_training_made_anew_is_not_taken_for_the_one_before(tiny_run, tmp_path):
    task, folder = tiny_run
    shutil.copytree(folder / "out/demo_g4_s0", tmp_path / "moved/out/demo_g4_s0")
    task = (*task[:-1], tmp_path / "moved/out")
    assert train(task)[0]["config"]["pretrain"]["weights"]
    path = tmp_path / "moved/out/demo_g4_s0/pretrain.pt"
    pre = pretrain.load_checkpoint(path)
    pretrain.save_checkpoint(path, **{**pre, "config": {**pre["config"], "weights": "0" * 12}})  # another machine made it
    one_line_error(script("train_imbanid.py", *task, *TINY_TRAIN, ok=False), "pretrain's weights", "--restart")


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_killed_at_five_random_moments_ends_the_same(tiny_run, sent):
    """Before anything is saved, within the first epoch, at two random moments of training, and after the last epoch.

    Where the run is asked to stop, it saves what it has, within an epoch as well.
    """
    task, epochs = tiny_run[0], 9
    flags = ("--epochs", epochs, "--max_steps", 5000, "--batch_size", 2)  # an epoch has more than SAVE_STEPS batches
    _, unbroken = train(task, *flags, "--tag", "unbroken")
    broken = unbroken.with_name(f"demo_g4_s0_broken{int(sent)}")
    words = ["train_imbanid.py", *task, *TINY_TRAIN, *flags, "--tag", f"broken{int(sent)}"]
    moment, kills, last, log = random.Random(0), 0, broken / "last.pt", broken / "log.jsonl"
    asked_to_stop, steps = sent == signal.SIGTERM, []

    def reached(kill, before):
        if kill == 0:
            return broken.exists()
        if kill == 4:
            return log.exists() and log.read_text().count("\n") == epochs
        return last.exists() and last.stat().st_mtime_ns > before

    for kill in range(5):
        before = last.stat().st_mtime_ns if last.exists() else 0
        process = Started([REPO / words[0], *words[1:]])
        while process.poll() is None and not reached(kill, before):
            time.sleep(0.001)
        time.sleep(moment.random() * (0.2 if 1 < kill < 4 else 0.02))
        kills += process.poll() is None
        process.send_signal(sent)
        process.finish()
        steps += [pretrain.load_checkpoint(last)["step"]] if last.exists() else []
        assert kill > 0 or not last.exists(), "killed too late to be before what is saved first"
        assert kill != 1 or pretrain.load_checkpoint(last)["step"] > 0, "killed too late to be within an epoch"
    assert kills >= 4 and not (broken / "results.json").exists(), "the run is too short for this test"
    assert not asked_to_stop or any(step % pretrain.SAVE_STEPS for step in steps), "no checkpoint of its own"
    assert "resuming" in script(*words).stdout
    for name in ("test_pred.npy", "pseudo_label.npy", "test_feature.npy", "train_feature.npy", "confidence.npy", "beta.npy",
                 "log.jsonl"):
        assert (broken / name).read_bytes() == (unbroken / name).read_bytes(), name
    ends = [json.loads((p / "results.json").read_text()) for p in (broken, unbroken)]
    for end in ends:
        for key in ("seconds", "peak_memory_mb", "tag", "threads"):  # the unbroken run is one of this process
            end.pop(key)
    assert ends[0] == ends[1] and not list(broken.glob("*.part"))


@pytest.mark.parametrize("sent, stage, nproc, lines", [
    (signal.SIGTERM, "train_imbanid.py", 1, 1), (signal.SIGINT, "pretrain.py", 1, 1),
    (signal.SIGTERM, "pretrain.py", 2, 2), (signal.SIGINT, "train_imbanid.py", 2, 1)])  # on SIGINT one speaks for all
def test_ctrl_c_and_sigterm_say_how_to_go_on(tiny_run, tiny_encoder, tmp_path, sent, stage, nproc, lines):
    task, folder = tiny_run
    if stage == "pretrain.py":
        flags = (*task[:-1], tmp_path, *TINY_PRETRAIN, "--encoder", tiny_encoder, "--epochs", 40, "--patience", 40)
        saved = tmp_path / "demo_g4_s0/pretrain_part.pt"
    else:
        flags = (*task, *TINY_TRAIN, "--epochs", 40, "--tag", f"sent{nproc}")
        saved = folder / f"out/demo_g4_s0_sent{nproc}/last.pt"
    said = f"{stage}: stopped; the same command goes on from what is saved"
    process = started_until(saved, torchrun(stage, *flags) if nproc > 1 else Started([REPO / stage, *flags]))
    process.send_signal(sent)
    if nproc > 1:
        _, errors = process.communicate(timeout=PATIENCE)
        assert 0 < errors.count(f"{said}\n") <= lines and "SignalException" in errors, errors  # the latter is torchrun's own
    else:
        one_line_error(process.finish(), said)
    assert "resuming" in script(stage, *flags, nproc=nproc if nproc > 1 else None).stdout


def torchrun(name, *flags, restarts=0):
    """A script on two processes of a torchrun that has just been started, as subprocess.Popen."""
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
                             "--max_restarts", str(restarts), str(REPO / name), *map(str, flags)],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def started_until(saved, process):
    """The process, once it has written the file `saved` and while it still runs."""
    late = time.time() + PATIENCE
    while not saved.exists():
        if process.poll() is not None or time.time() > late:
            process.kill()
            pytest.fail(str(process.finish() if isinstance(process, Started) else process.communicate()))
        time.sleep(0.01)
    return process


def children(pid):
    """Process ids of the python processes that process pid started."""
    found = []
    for p in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # others may end meanwhile
            if (p / "stat").read_text().rsplit(")", 1)[1].split()[1] == str(pid):
                found.append(int(p.name))
    return found


@pytest.mark.parametrize("stage, restarts", [("pretrain.py", 0), ("train_imbanid.py", 1)])
def test_a_killed_rank_ends_the_job_or_restarts_it(tiny_run, tiny_encoder, tmp_path, stage, restarts):
    task, folder = tiny_run
    if stage == "pretrain.py":
        flags, out = (*TINY_PRETRAIN, "--encoder", tiny_encoder, "--out_dir", tmp_path), tmp_path / "demo_g4_s0"
        saved, finished = out / "pretrain_part.pt", out / "pretrain.pt"
    else:
        flags, out = (*TINY_TRAIN, "--tag", f"rank{restarts}"), folder / f"out/demo_g4_s0_rank{restarts}"
        saved, finished = out / "last.pt", out / "results.json"
    flags = (*flags, "--epochs", 2, "--batch_size", 2)  # what is saved first is within an epoch
    process = started_until(saved, torchrun(stage, *task, *flags, restarts=restarts))
    rank = f"RANK={1 if restarts else 0}"  # 0 is the one that speaks for all
    environ = {pid: Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in children(process.pid)}
    os.kill(next(pid for pid in environ if rank in environ[pid]), signal.SIGKILL)
    said, errors = process.communicate(timeout=PATIENCE)
    if restarts:
        assert process.returncode == 0 and "after epoch 0 and" in said and finished.exists(), errors
    else:
        assert process.returncode != 0 and "the same command goes on from what is saved" in errors, errors
        assert "after epoch 0 and" in script(stage, *task, *flags, nproc=2).stdout and finished.exists()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_pre_training_goes_on_and_ends_the_same(tiny_run, tiny_encoder, tmp_path, sent):
    ends = []
    for name in ("unbroken", "broken"):
        words = (*tiny_run[0][:-1], tmp_path / name, "--encoder", tiny_encoder, *TINY_PRETRAIN, "--epochs", 4)
        words += ("--batch_size", 2)  # more than SAVE_STEPS batches an epoch
        part = tmp_path / name / "demo_g4_s0/pretrain_part.pt"
        if name == "broken":
            process = started_until(part, Started([REPO / "pretrain.py", *words]))
            process.send_signal(sent)
            process.finish()
            step = pretrain.load_checkpoint(part)["step"]
            assert step > 0, "killed too late to be within an epoch"
            assert sent == signal.SIGKILL or step % pretrain.SAVE_STEPS, "no checkpoint of its own"
        assert ("resuming" in script("pretrain.py", *words).stdout) == (name == "broken")
        ends.append(torch.load(tmp_path / name / "demo_g4_s0/pretrain.pt", weights_only=True))
        assert not part.exists()
    assert ends[0]["log"] == ends[1]["log"] and ends[0]["epoch"] == ends[1]["epoch"]
    one, other = (end["trained_layers"] | end["mlm_head"] | {"": end["classifier"]} for end in ends)
    assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


@pytest.mark.parametrize("stage", ["train_imbanid.py", "pretrain.py"])
def test_two_processes_that_were_stopped_within_epochs_end_the_same(tiny_run, tiny_encoder, tmp_path, stage):
    task, folders, steps, moment = tiny_run[0], [tmp_path / "unbroken", tmp_path / "broken"], [], random.Random(1)
    flags = ("--epochs", 3, "--max_steps", 5000, "--batch_size", 2)  # an epoch has more than SAVE_STEPS batches
    if stage == "pretrain.py":
        flags, run, saved = (*TINY_PRETRAIN, *flags, "--encoder", tiny_encoder), "demo_g4_s0", "pretrain_part.pt"
    else:
        flags, run, saved = (*TINY_TRAIN, *flags, "--tag", "two"), "demo_g4_s0_two", "last.pt"
        for folder in folders:
            shutil.copytree(tiny_run[1] / "out/demo_g4_s0", folder / "demo_g4_s0")
    whole, broken = ((*task[:-1], folder, *flags) for folder in folders)
    other, out = (folder / run for folder in folders)
    last = out / saved
    script(stage, *whole, nproc=2)
    for which in (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
        before = last.stat().st_mtime_ns if last.exists() else 0
        both = start_ranks([REPO / stage, *broken], 2)
        while all(one.poll() is None for one in both) and not (last.exists() and last.stat().st_mtime_ns > before):
            time.sleep(0.001)
        time.sleep(0.1 * moment.random())
        both[len(steps) % 2].send_signal(which)
        for one in both:
            one.finish()
        steps += [pretrain.load_checkpoint(last)["step"]] if last.exists() else []
    assert any(step % pretrain.SAVE_STEPS for step in steps), "no checkpoint of a signal"
    script(stage, *broken, nproc=2)
    if stage == "pretrain.py":
        ends = [pretrain.load_checkpoint(folder / "pretrain.pt") for folder in (out, other)]
        assert ends[0]["log"] == ends[1]["log"] and ends[0]["config"]["weights"] == ends[1]["config"]["weights"]
        return
    for name in ("test_pred.npy", "pseudo_label.npy", "test_feature.npy", "confidence.npy", "beta.npy", "log.jsonl"):
        assert (out / name).read_bytes() == (other / name).read_bytes(), name


def test_pretraining_switches(tiny_run, tiny_encoder, tmp_path):
    task = [str(word) for word in tiny_run[0][:-1]]
    states = []
    switches = [(), ("--no_mlm",), ("--temperature", 0.5), ("--mask_epochs", 1), ("--labeled_batch_size", 4)]
    for i, switch in enumerate(switches):
        flags = [*task, str(tmp_path / str(i)), "--encoder", str(tiny_encoder), *map(str, TINY_PRETRAIN), *map(str, switch)]
        pretrain.main(parse_args(pretrain.Args, flags))
        states.append(torch.load(tmp_path / str(i) / "demo_g4_s0/pretrain.pt", weights_only=True)["log"])
    assert all(a != b for i, a in enumerate(states) for b in states[:i])


@pytest.mark.parametrize("select, key, best", [("loss", "dev_loss", min), ("accuracy", "dev_accuracy", max)])
def test_early_stopping_keeps_the_best_epoch(tiny_run, tiny_encoder, tmp_path, select, key, best):
    task = [str(word) for word in tiny_run[0][:-1]]
    flags = [*task, str(tmp_path), "--encoder", str(tiny_encoder), *map(str, TINY_PRETRAIN), "--epochs", "60"]
    flags += ["--patience", "2", "--lr", "0.05", "--head_lr", "0.5", "--select", select]
    pretrain.main(parse_args(pretrain.Args, flags))
    found = torch.load(tmp_path / "demo_g4_s0/pretrain.pt", weights_only=True)
    told = [line[key] for line in found["log"]]
    assert len(told) < 60 and len(told) == found["epoch"] + 2 and found[key] == best(told) == told[found["epoch"] - 1]
    assert len(set(told)) > 1


def test_a_finished_pre_training_is_skipped_and_one_of_other_settings_or_data_refused(tiny_run, tiny_encoder, tmp_path):
    data = shutil.copytree(tiny_run[1] / "data", tmp_path / "data") / "demo_g4_s0"
    task = (*tiny_run[0][:-3], tmp_path / "data", "--out_dir", tmp_path / "out")
    done, words = tmp_path / "out/demo_g4_s0/pretrain.pt", (*task, "--encoder", tiny_encoder, *TINY_PRETRAIN)
    script("pretrain.py", *words)
    before = done.read_bytes(), done.stat().st_mtime_ns
    assert "made with the same settings" in script("pretrain.py", *words).stdout
    one_line_error(script("pretrain.py", *words, "--epochs", 1, ok=False), "epochs 2, now 1", "--restart")
    assert (done.read_bytes(), done.stat().st_mtime_ns) == before
    script("pretrain.py", *words, "--max_steps", 1, "--restart")
    assert len(torch.load(done, weights_only=True)["log"]) == 1
    train(task)
    label = np.load(data / "train_label.npy")
    np.save(data / "train_label.npy", np.where(label == 0, 1, np.where(label == 1, 0, label)))
    one_line_error(script("train_imbanid.py", *task, *TINY_TRAIN, "--restart", ok=False), "trained on other data", "--restart")
    one_line_error(script("predict.py", done.parent, "--data_dir", tmp_path / "data", ok=False), "other data now")


@pytest.mark.parametrize("flags,words", [
    (["--num_classes", "100000"], ["num_classes", "rows"]), (["--num_classes", "2"], ["num_classes"]),
    (["--num_classes", "many"], ["num_classes"]), (["--pseudo_label", "uot"], ["uot"]), (["--tau", "0"], ["tau"]),
    (["--device", "tpu"], ["tpu"]), (["--dtype", "int8"], ["int8"]), (["--epochs", "-1"], ["epochs"]),
    (["--what"], ["--what"]), (["--lambda2", "-1"], ["lambda2"]), (["--lambda1", "inf"], ["lambda1"]), (["--mu", "1"], ["mu"]),
    (["--mu", "0.5"], ["--pseudo_label mot"]), (["--max_classes", "9"], ["--num_classes appendix_e"]),
    (["--tag", "a/b"], ["tag"]), (["--tag", "gcd"], ["--tag gcd"]), (["--lr", "1e39"], ["lr", "below 1e+38"]),
    (["--label_weight", "1e39"], ["label_weight", "below 1e+38"]), (["--temperature", "1e-40"], ["log P", "--temperature"]),
    (["--lambda1", "1e-310"], ["--lambda1 1e-310", "larger"])])
def test_bad_flags(tiny_run, flags, words):
    with pytest.raises(UserError) as said:
        train_imbanid.main(parse_args(train_imbanid.Args, [*map(str, tiny_run[0]), "--tag", "bad", *flags]))
    assert all(word in str(said.value) for word in words) and "\n" not in str(said.value)
    assert not list((tiny_run[1] / "out").glob("demo_g4_s0_bad/*"))


def test_a_damaged_or_missing_checkpoint(tiny_run, tmp_path):
    task, folder = tiny_run
    task = (*task[:-1], tmp_path)
    one_line_error(script("train_imbanid.py", *task, ok=False), "pretrain.pt is missing")
    (tmp_path / "demo_g4_s0").mkdir()
    whole = (folder / "out/demo_g4_s0/pretrain.pt").read_bytes()
    (tmp_path / "demo_g4_s0/pretrain.pt").write_bytes(whole[:len(whole) // 2])
    one_line_error(script("train_imbanid.py", *task, ok=False), "damaged")


@pytest.mark.parametrize("cause", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), OSError(errno.EIO, "I/O error")])
def test_a_checkpoint_that_cannot_be_read_now_is_not_called_damaged(tmp_path, monkeypatch, cause):
    def fail(*_, **__):
        raise cause

    (tmp_path / "last.pt").touch()
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(type(cause)) as said:
        pretrain.load_checkpoint(tmp_path / "last.pt")
    assert said.value is cause


@pytest.mark.parametrize("text", ["[1]", "{}", "{"])
def test_a_damaged_results_file_is_said(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(UserError, match="damaged"):
        train_imbanid.read_finished(tmp_path, {}, train_imbanid.Args())


def test_a_folder_that_was_removed_is_said(tmp_path):
    with pytest.raises(UserError, match="no folder"):
        write_atomic(tmp_path / "gone/log.jsonl", "")


def test_a_write_that_numpy_breaks_off_is_said_with_its_file(tmp_path):
    def save(file):
        raise OSError("100 requested and 10 written")  # numpy's words for a full disk, without a number

    with pytest.raises(OSError) as said:
        write_atomic(tmp_path / "beta.npy", save)
    message, _ = explain(said.value, train_imbanid.Args)
    assert f"{tmp_path}/beta.npy: 100 requested and 10 written" in message and not list(tmp_path.iterdir())


def test_dropout_goes_on_from_a_checkpoint_of_such_a_device_and_as_many_processes():
    before, cpu = torch.get_rng_state(), torch.device("cpu")
    for other in ({"cuda": torch.zeros(1, 16, dtype=torch.uint8)}, {"cpu": torch.stack([before, before])}, None):
        pretrain.set_dropout_state(cpu, 0, other)  # of a GPU, of two processes
        assert torch.equal(torch.get_rng_state(), before)
    found = pretrain.dropout_state(cpu)
    torch.rand(1)
    pretrain.set_dropout_state(cpu, 0, found)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_long_line_of_a_library_is_cut():
    assert quoted("one\ntwo\n") == "one" and quoted("one\ntwo\n", -1) == "two"
    assert quoted("") == "" and quoted("x" * 150) == "x" * 150
    assert quoted("word " * 40) == "word " * 28 + "word ..." and quoted("x" * 151) == "x" * 147 + " ..."


def test_a_leftover_world_size_is_said(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="start it with torchrun, or unset WORLD_SIZE"):
        pretrain.start_processes(torch.device("cpu"), {})


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_within_a_checkpoint_waits_for_its_end(tmp_path, monkeypatch, sent):
    def save(_, file):
        file.write(b"one half, ")
        signal.raise_signal(sent)
        file.write(b"the other half")

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", save)
    before = signal.signal(sent, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            pretrain.save_checkpoint(tmp_path / "last.pt")
        assert (tmp_path / "last.pt").read_bytes() == b"one half, the other half" and signal.getsignal(sent) is stop
    finally:
        signal.signal(sent, before)


def test_a_signal_that_waits_gives_way_to_an_error_unless_it_is_what_ended_another_process():
    def stop(*_):
        raise KeyboardInterrupt

    before = {which: signal.signal(which, stop) for which in (signal.SIGINT, signal.SIGTERM)}
    try:
        for sent, error, expected in (
                (signal.SIGTERM, RuntimeError, RuntimeError), (signal.SIGINT, RuntimeError, KeyboardInterrupt),
                (signal.SIGINT, OSError, OSError), (signal.SIGTERM, None, KeyboardInterrupt)):
            with pytest.raises(expected), pretrain.signals_held() as came:
                signal.raise_signal(sent)
                assert came == [sent]
                if error:
                    raise error
            assert signal.getsignal(sent) is stop
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nohup, or a script's &
        with pretrain.signals_held() as came:
            signal.raise_signal(signal.SIGINT)
        assert not came and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def test_under_torchrun_a_mistake_is_said_though_the_first_process_is_late(tmp_path):
    """torchrun ends all processes when one has ended: one that does not speak must not end first."""
    words = f"if [ $LOCAL_RANK = 0 ]; then sleep 2; fi; exec {sys.executable} {REPO}/train_imbanid.py --data_dir {tmp_path}"
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
                           "--no-python", "bash", "-c", f"{words} --dataset demo --gamma 4"],
                          capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode and done.stderr.count("train_imbanid.py: ") == 1 and "is missing" in done.stderr, done.stderr


def test_a_training_whose_output_nobody_reads_does_not_end_as_if_it_were_done():
    code = f"""import sys; sys.path.insert(0, {str(REPO)!r})
import make_lt_data
make_lt_data.run_script(lambda _: print("one line"), eval(sys.argv.pop()))"""
    late = "import atexit, os; atexit.register(os.kill, os.getpid(), 15); "
    done = subprocess.run([sys.executable, "-c", late + code, "None"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "one line\n", ""), "a SIGTERM that comes when all is done"
    words = {("__import__('pretrain').Args", "pipe"): "closed", ("None", "pipe"): "", ("None", "/dev/full"): "No space left"}
    for (Args, out), expected in words.items():
        read, pipe = os.pipe()
        os.close(read)
        full = os.open("/dev/full", os.O_WRONLY)
        done = subprocess.run([sys.executable, "-c", code, Args], stdout={"pipe": pipe}.get(out, full), stderr=subprocess.PIPE,
                              text=True, env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"})
        os.close(pipe)
        os.close(full)
        assert done.returncode == (2 if expected else 0), done.stderr
        assert done.stderr.count("\n") == bool(expected) and expected in done.stderr


def test_an_encoder_whose_weights_were_exchanged(tiny_run, tiny_encoder, tmp_path):
    """The same name and the same shapes, but not the frozen layers that the checkpoint's layer was trained on."""
    from safetensors.torch import load_file, save_file
    folder = shutil.copytree(tiny_encoder, tmp_path / "encoder")
    task = (*tiny_run[0][:-1], tmp_path / "out")
    script("pretrain.py", *task, *TINY_PRETRAIN, "--epochs", 1, "--encoder", folder)
    weights = load_file(folder / "model.safetensors")
    weights["bert.encoder.layer.0.intermediate.dense.weight"][0, 0] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    one_line_error(script("train_imbanid.py", *task, *TINY_TRAIN, ok=False), "the weights or the tokenizer of --encoder")
    straight = torch.nn.Linear(3, 2, bias=False)
    turned = torch.nn.Linear(3, 2, bias=False)
    turned.weight.data = straight.weight.detach().t().contiguous().t()  # as some .bin files hold them
    assert not turned.weight.is_contiguous() and weights_sha256([turned.weight]) == weights_sha256([straight.weight])


def test_frozen_weights_in_bfloat16_give_what_autocast_makes_of_them(tiny_encoder):
    """Cast once instead of for every chunk; with the frozen weights in float32 the numbers are the same."""
    encoder = Encoder(str(tiny_encoder), 32, torch.device("cpu"), torch.bfloat16)
    tokens = encoder.tokenize(["open the door", "set an alarm for six in the morning", "play"])
    layers = encoder._frozen[0].base_model.encoder.layer
    assert layers[0].intermediate.dense.weight.dtype == torch.bfloat16
    hidden = encoder.trunk(tokens).values
    whole = Encoder(str(tiny_encoder), 32, torch.device("cpu"), torch.float32)
    assert whole.fingerprint == encoder.fingerprint
    assert torch.allclose(hidden.float(), whole.trunk(tokens).values, atol=0.1)
    layers.float()
    layers.load_state_dict(whole._frozen[0].base_model.encoder.layer.state_dict())
    assert torch.equal(hidden, encoder.trunk(tokens).values)


def test_settings_of_the_pre_training_that_differ_are_named():
    old, new = ({"lr": 1, "pretrain": {"lr": lr, **more}} for lr, more in ((2, {"gone": 0}), (3, {})))
    with pytest.raises(UserError, match="pretrain's lr 2, now 3"):
        pretrain.same_config(old, new, "last.pt", pretrain.Args())
    with pytest.raises(UserError, match="pretrain's gone 0, now None"):
        pretrain.same_config(old, {"lr": 1, "pretrain": {"lr": 2}}, "last.pt", pretrain.Args())
    assert pretrain.same_config(old, new, "last.pt", pretrain.Args(restart=True)) is False


def test_a_run_goes_on_on_a_machine_of_another_type(tiny_run, monkeypatch, capsys):
    """--dtype auto is float32 on one machine and bfloat16 on the next: neither a finished run nor a killed one is lost."""
    task = (*tiny_run[0], "--tag", "types")

    def again(*flags):
        capsys.readouterr()
        train_imbanid.main(parse_args(train_imbanid.Args, [*map(str, (*task, *TINY_TRAIN, *flags))]))
        return capsys.readouterr().out

    again()
    monkeypatch.setattr(train_imbanid, "pick_dtype", lambda wanted, _: getattr(torch, wanted.replace("auto", "bfloat16")))
    assert "skipped" in again("--dtype", "auto")
    out = tiny_run[1] / "out/demo_g4_s0_types"
    (out / "results.json").unlink()  # as if it had been killed after its last epoch
    assert "epoch 2, so far in float32, now in bfloat16, this machine's: --dtype float32 keeps it" in again("--dtype", "auto")
    assert json.loads((out / "results.json").read_text())["config"]["dtype"] == "bfloat16"
    assert "skipped" in again("--dtype", "bfloat16")
    with pytest.raises(UserError, match="dtype 'bfloat16', now 'float32'"):
        again("--dtype", "float32")


def test_an_encoder_that_is_not_there_or_damaged(tiny_run, tiny_encoder, tmp_path):
    task = (*tiny_run[0][:-1], tmp_path)
    damaged = shutil.copytree(tiny_encoder, tmp_path / "damaged")
    (damaged / "model.safetensors").unlink()
    torch.save({"bert.embeddings.word_embeddings.weight": torch.ones(9000, 32)}, damaged / "pytorch_model.bin")
    os.truncate(damaged / "pytorch_model.bin", 10_000)
    one_line_error(script("pretrain.py", *task, "--encoder", damaged, ok=False), "--encoder", "cannot be loaded")
    for content in ("[1]", (tiny_encoder / "config.json").read_text().replace('"hidden_size": 32', '"hidden_size": "x"')):
        (damaged / "config.json").write_text(content)
        with pytest.raises(UserError, match="cannot be loaded"):
            load_masked_lm(str(damaged))
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}  # nor what a user has in the cache
    for name in (tmp_path / "nothing", "bert-base-uncased"):
        one_line_error(script("pretrain.py", *task, "--encoder", name, ok=False, env=offline), "--encoder", "minilm")


def test_an_encoder_whose_file_lacks_weights(tiny_encoder, tmp_path):
    """transformers draws what is missing, and says so where nobody reads it: of the head that is right, else nothing is."""
    weights = load_file(tiny_encoder / "model.safetensors")
    for name, kept in (("layer", {k: v for k, v in weights.items() if ".layer.1." not in k}),
                       ("wrapped", {f"module.{k}": v for k, v in weights.items()}),
                       ("head", {k: v for k, v in weights.items() if not k.startswith("cls.predictions.transform")})):
        folder = shutil.copytree(tiny_encoder, tmp_path / name)
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        with contextlib.nullcontext() if name == "head" else pytest.raises(UserError, match="its file lacks .* weights, bert"):
            Encoder(str(folder), 32, torch.device("cpu"), torch.float32)


def test_an_encoder_that_brings_code_is_refused(tiny_encoder, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers may ask
    folder = shutil.copytree(tiny_encoder, tmp_path / "brings")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": {
        "AutoConfig": "conf.OwnConfig", "AutoModelForMaskedLM": "conf.OwnModel"}}))
    (folder / "conf.py").write_text(f"open({str(tmp_path / 'has_run')!r}, 'w')\n")
    with pytest.raises(UserError, match="cannot be loaded"):
        Encoder(str(folder), 32, torch.device("cpu"), torch.float32)
    assert not (tmp_path / "has_run").exists()


def test_an_encoder_without_an_unknown_or_a_mask_token(tiny_encoder, tmp_path):
    from transformers import BertTokenizer
    for token, word in (("mask_token", "--no_mlm"), ("unk_token", "no unknown token")):
        folder = shutil.copytree(tiny_encoder, tmp_path / token)
        tokenizer = BertTokenizer.from_pretrained(folder)
        setattr(tokenizer, token, None)
        tokenizer.save_pretrained(folder)
        with pytest.raises(UserError, match=word):
            encoder = Encoder(str(folder), 32, torch.device("cpu"), torch.float32)
            encoder.mask_tokens(encoder.tokenize(TEXTS), torch.Generator())


def test_an_encoder_without_its_tokenizers_files_or_with_odd_ones(tiny_encoder, tmp_path):
    """transformers makes a tokenizer of nothing, for some families one that knows no word and says nothing of it."""
    from transformers import RobertaConfig, RobertaForMaskedLM
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    RobertaForMaskedLM(RobertaConfig(vocab_size=99, **size)).save_pretrained(tmp_path / "roberta")
    make_encoder(tmp_path / "mpnet", mpnet=True)
    for path in (tmp_path / "mpnet").glob("*token*"):
        path.unlink()
    for name, file, key, value in (("reads_2", "tokenizer_config.json", "model_max_length", 2),
                                   ("relative", "config.json", "position_embedding_type", "relative_key"),
                                   ("tuples", "config.json", "return_dict", False)):
        path = shutil.copytree(tiny_encoder, tmp_path / name) / file
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    for name, reason in (("roberta", "its tokenizer knows no word"), ("mpnet", "cannot be loaded .WordPiece error"),
                         ("reads_2", "its tokenizer leaves no word"), ("relative", "its positions are relative")):
        with pytest.raises(UserError, match=reason):
            Encoder(str(tmp_path / name), 32, torch.device("cpu"), torch.float32)
    Encoder(str(tmp_path / "tuples"), 32, torch.device("cpu"), torch.float32)


def test_an_encoder_whose_vocabulary_has_a_line_twice(tiny_encoder, tmp_path):
    """The last token's id is above the number of different tokens then."""
    folder = shutil.copytree(tiny_encoder, tmp_path / "twice")
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    for path in folder.glob("*token*"):
        path.unlink()
    words = sorted(vocab, key=vocab.get)
    (folder / "vocab.txt").write_text("\n".join(words[:-2] + 2 * [words[-2]]) + "\n", encoding="utf-8")
    encoder = Encoder(str(folder), 32, torch.device("cpu"), torch.float32)
    tokens = encoder.tokenize([words[-2]] * 20)
    assert int(tokens.values.max()) == len(encoder.tokenizer), "of no other kind than this test is about"
    encoder.limit_vocabulary(tokens)
    masked, target = encoder.mask_tokens(tokens, torch.Generator().manual_seed(0))
    loss, count = encoder.mlm_loss(encoder.trunk(masked), torch.arange(20), target)
    assert count > 0 and loss.isfinite()


def test_an_encoder_that_works_otherwise(tiny_encoder, tmp_path):
    """Layers of BERT's names that norm first, or embeddings of another width, would be computed wrongly."""
    from transformers import (
        BigBirdConfig,
        BigBirdForMaskedLM,
        ElectraConfig,
        ElectraForMaskedLM,
        RobertaPreLayerNormConfig,
        RobertaPreLayerNormForMaskedLM,
    )
    shutil.copytree(tiny_encoder, tmp_path, dirs_exist_ok=True)
    size = {"vocab_size": 9000, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    for model in (RobertaPreLayerNormForMaskedLM(RobertaPreLayerNormConfig(**size)),
                  ElectraForMaskedLM(ElectraConfig(**size, embedding_size=16)), BigBirdForMaskedLM(BigBirdConfig(**size))):
        model.save_pretrained(tmp_path)
        with pytest.raises(UserError, match="not BERT-like"):
            Encoder(str(tmp_path), 32, torch.device("cpu"), torch.float32)


def test_half_precision_checkpoints_and_roberta(tiny_encoder, tmp_path):
    """Weights kept in bfloat16 are read as float32; RoBERTa's first places belong to padding."""
    from transformers import BertForMaskedLM, RobertaConfig, RobertaForMaskedLM
    shutil.copytree(tiny_encoder, tmp_path, dirs_exist_ok=True)
    BertForMaskedLM.from_pretrained(tiny_encoder).bfloat16().save_pretrained(tmp_path)
    assert next(Encoder(str(tmp_path), 32, torch.device("cpu"), torch.float32).parameters()).dtype == torch.float32
    config = RobertaConfig(vocab_size=9000, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                           max_position_embeddings=66, pad_token_id=1)
    RobertaForMaskedLM(config).save_pretrained(tmp_path)
    encoder = Encoder(str(tmp_path), 600, torch.device("cpu"), torch.float32)
    tokens = encoder.tokenize(["open the door " * 50])
    assert tokens.lengths.tolist() == [64] and encoder.all_features(encoder.trunk(tokens)).isfinite().all()


def test_mpnet(tmp_path):
    """Its parts have other names, and its attention adds something for the distance of two tokens."""
    from transformers import MPNetForMaskedLM
    make_encoder(tmp_path, layers=3, dropout=0.0, mpnet=True)
    model = MPNetForMaskedLM.from_pretrained(tmp_path)
    encoder = Encoder(str(tmp_path), 600, torch.device("cpu"), torch.float32)
    tokens = encoder.tokenize(["open the door " * 50, "turn off the light in the hall", ""])
    assert tokens.lengths.tolist() == [64, 9, 2]
    hidden, rows = encoder.trunk(tokens), torch.arange(3)
    with torch.no_grad():
        want = torch.stack([model.mpnet(row[None]).last_hidden_state[0].mean(0)
                            for row in tokens.values.split(tokens.lengths.tolist())])
    assert torch.allclose(encoder.all_features(hidden), want, atol=1e-5)
    encoder.train()  # attention is written out there
    z = encoder.features(hidden, rows)
    assert torch.allclose(z, want, atol=1e-5)
    encoder._bias += torch.randn(64, 64)
    assert not torch.allclose(encoder.features(hidden, rows), want, atol=1e-3)
    encoder.limit_vocabulary(tokens)
    masked, target = encoder.mask_tokens(tokens, torch.Generator().manual_seed(0))
    loss, count = encoder.mlm_loss(encoder.trunk(masked), rows, target)
    (loss + z.sum()).backward()
    assert count > 5 and all(p.grad.isfinite().all() and p.grad.any() for name, p in encoder.trained_layers.named_parameters()
                             if "key.bias" not in name)  # of which softmax sees nothing


def test_the_longest_text(tiny_encoder):
    """A model reads no more tokens than it has places for, whatever --max_length says."""
    encoder = Encoder(str(tiny_encoder), 600, torch.device("cpu"), torch.float32)
    tokens = encoder.tokenize(["open the door " * 50, ""])
    assert not any(part.training for part in encoder.trained_layers.modules())
    assert tokens.lengths.tolist() == [64, 2] and encoder.all_features(encoder.trunk(tokens)).isfinite().all()
    with pytest.raises(UserError, match="--max_length 2"):
        Encoder(str(tiny_encoder), 2, torch.device("cpu"), torch.float32)


def test_a_text_of_which_the_tokenizer_makes_nothing(tiny_encoder, tmp_path):
    """Where it puts no [CLS] and [SEP] around a text, one of signs that nobody sees is the unknown token."""
    folder = shutil.copytree(tiny_encoder, tmp_path / "encoder")
    for name, key, value in (("tokenizer.json", "post_processor", None),
                             ("tokenizer_config.json", "tokenizer_class", "PreTrainedTokenizerFast")):
        held = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(held | {key: value}))
    encoder = Encoder(str(folder), 32, torch.device("cpu"), torch.float32)
    tokens = encoder.tokenize(["play", "\u200b"])
    assert tokens.lengths.tolist() == [1, 1] and tokens.values[1] == encoder.tokenizer.unk_token_id
    assert encoder.all_features(encoder.trunk(tokens)).isfinite().all()


def test_a_disk_that_fills_up_within_a_checkpoint_is_said_in_one_line(tmp_path):
    """torch's zip writer turns a write that fails after the first megabytes into an error of its own."""
    code = f"""import resource, sys; sys.path.insert(0, {str(REPO)!r})
import torch, make_lt_data, pretrain
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
make_lt_data.run_script(lambda _: pretrain.save_checkpoint({str(tmp_path / "x.pt")!r}, x=torch.ones(10 ** 6)))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    one_line_error(done, "File too large")
    assert not list(tmp_path.iterdir())


def test_no_memory_is_said_in_one_line_and_other_errors_are_not_hidden():
    code = f"""import sys; sys.path.insert(0, {str(REPO)!r})
import torch, make_lt_data
make_lt_data.run_script(lambda _: eval(sys.argv[1]))"""
    for size in ("torch.empty(10 ** 15)", "make_lt_data.np.zeros((10 ** 9, 10 ** 6))"):
        one_line_error(subprocess.run([sys.executable, "-c", code, size], capture_output=True, text=True, timeout=PATIENCE),
                       "out of memory", "--batch_size")
    done = subprocess.run([sys.executable, "-c", code, "torch.ones(2) @ torch.ones(3)"], capture_output=True, text=True)
    assert done.returncode == 1 and "RuntimeError" in done.stderr


def test_a_gpu_that_cannot_be_used_is_said_and_not_taken_for_a_wrong_encoder(tiny_encoder, monkeypatch):
    with pytest.raises(ThisProcessError, match="the GPU cannot be used .*--device cpu"):  # no machine has so many
        Encoder(str(tiny_encoder), 32, torch.device("cuda", 99), torch.float32)

    def busy(**_):
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", busy)
    with pytest.raises(ThisProcessError, match="the GPU cannot be used .*busy.*--device cpu"):
        pick_dtype("auto", torch.device("cuda"))


def test_a_full_disk_is_said_in_one_line(tiny_run, tiny_encoder, tmp_path):
    """A file-size limit stands in for a full disk: the write fails in the middle of the checkpoint."""
    full = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (8192, 8192))
    words = (*tiny_run[0][:-1], tmp_path, "--encoder", tiny_encoder, *TINY_PRETRAIN)
    one_line_error(script("pretrain.py", *words, first=full, ok=False), "demo_g4_s0/pretrain_part.pt: File too large")
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]

    part = tmp_path / "demo_g4_s0/pretrain_part.pt"
    process = started_until(part, Started([REPO / "pretrain.py", *words, "--epochs", 60]))
    process.kill()
    process.finish()
    before = part.read_bytes()
    done = script("pretrain.py", *words, "--epochs", 60, first=full, ok=False)
    one_line_error(done, f"{part}: File too large", "the same command goes on from what is saved")
    assert part.read_bytes() == before and [p for p in tmp_path.rglob("*") if p.is_file()] == [part]
    assert "resuming" in script("pretrain.py", *words, "--epochs", 60).stdout and not part.exists()  # once there is room


def test_a_kill_before_the_last_line_of_pre_training_leaves_nothing(tiny_run, tiny_encoder, tmp_path):
    words = [str(word) for word in (*tiny_run[0][:-1], tmp_path, "--encoder", tiny_encoder, *TINY_PRETRAIN)]
    pretrain.main(parse_args(pretrain.Args, words))
    done, part = (tmp_path / f"demo_g4_s0/{name}.pt" for name in ("pretrain", "pretrain_part"))
    state = torch.load(done, weights_only=True)
    pretrain.save_checkpoint(part, **{**state, "config": {**state["config"], "lr": 1.0}})
    pretrain.main(parse_args(pretrain.Args, words))
    assert part.exists(), "of a --restart with other settings that was killed"
    shutil.copy(done, part)
    pretrain.main(parse_args(pretrain.Args, words))
    assert not part.exists() and done.exists()


def test_kmeans_keeps_the_numbers_of_the_heads_classes():
    noise = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    z = normalize(torch.eye(4)[torch.arange(40) % 4] + 0.05 * noise, dim=1)
    for order in ([2, 0, 3, 1], [0, 1, 2, 3]):
        plan = train_imbanid.kmeans_result(z, torch.eye(4)[order], 40, 0).plan
        assert torch.equal(torch.tensor(order)[plan.argmax(1)], torch.arange(40) % 4)


def test_a_stopped_run_of_mot_goes_on_from_its_shares(tiny_run, monkeypatch):
    flags, save = ("--epochs", 4, "--pseudo_label", "mot", "--mu", 0.5), train_imbanid.save_checkpoint

    def stop(path, **state):
        save(path, **state)
        if state["epoch"] == 2:
            raise KeyboardInterrupt

    whole = train(tiny_run[0], *flags, "--tag", "mot_whole")[1]
    monkeypatch.setattr(train_imbanid, "save_checkpoint", stop)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_run[0], *flags, "--tag", "mot_cut")
    monkeypatch.setattr(train_imbanid, "save_checkpoint", save)
    cut = train(tiny_run[0], *flags, "--tag", "mot_cut")[1]
    for name in ("log.jsonl", "pseudo_label.npy"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()


def test_scores_within_a_run_are_those_of_its_files(tiny_run, encoder):
    results, out = train(tiny_run[0], "--head_lr", 3.0, "--tag", "scores")
    data, state = tiny_run[1] / "data/demo_g4_s0", torch.load(out / "last.pt", weights_only=True)
    label, truth, counts = (np.load(data / f"{name}.npy") for name in ("train_label", "train_truth", "class_counts"))
    own = cluster_metrics(truth[label < 0], np.load(out / "pseudo_label.npy")[label < 0], label.max() + 1, counts)
    assert results["train_unlabelled"] == pytest.approx(own)
    before = pretrain.trained_state(encoder.trained_layers)
    pretrain.load_trained_layers(encoder, state)
    z = encoder.all_features(encoder.trunk(encoder.tokenize([row[0] for row in read_tsv(data / "dev.tsv")[1:]])))
    pretrain.load_trained(encoder.trained_layers, before)
    right = (z @ normalize(state["head"], dim=1).T).argmax(1).numpy() == np.load(data / "dev_label.npy")
    assert state["log"][-1]["dev_accuracy"] == pytest.approx(100 * right.mean())


def test_a_small_corpus_has_more_epochs_and_a_large_one_fewer(tiny_run, capsys):
    """An epoch has three batches here. What is said of it is what is done."""
    for n, (flags, epochs) in enumerate(((("--min_steps", 7), 3), (("--min_steps", 70, "--max_steps", 7), 3),
                                         (("--min_steps", 7, "--max_steps", 4), 2),
                                         (("--min_steps", 7, "--epochs", 0), 0), (("--min_steps", 4, "--epochs", 3), 3))):
        results = train(tiny_run[0], *flags, "--tag", f"steps{n}")[0]
        assert results["epochs"] == results["config"]["epochs"] == epochs
        said = re.search(r"(\d+) epochs instead of \d, so that these few rows make (\d+) batches", capsys.readouterr().out)
        assert (said and said.groups()) == (("3", "7") if n < 2 else None)


def test_what_stage_3_is_given(tiny_run, monkeypatch):
    clean, seeds, dropout, decay = [], [], set(), set()
    select, seed, loss = (getattr(train_imbanid, name) for name in ("select_clean", "seed_centres", "batch_loss"))
    step = pretrain.joint_step

    def batch_loss(encoder, *given):
        dropout.add(all(part.training for part in encoder.trained_layers.modules()))
        return loss(encoder, *given)

    def joint_step(of, optimizer, *more):
        decay.update(group["weight_decay"] for group in optimizer.param_groups)
        step(of, optimizer, *more)

    monkeypatch.setattr(train_imbanid, "select_clean", lambda *given: clean.append(given[3:7]) or select(*given))
    monkeypatch.setattr(train_imbanid, "seed_centres", lambda *given: seeds.append(given[-1]) or seed(*given))
    monkeypatch.setattr(train_imbanid, "batch_loss", batch_loss)
    monkeypatch.setattr(pretrain, "joint_step", joint_step)
    train(tiny_run[0], "--rho", 0.3, "--tau_g", 0.2, "--no_qr", "--tag", "given")
    assert set(clean) == {(0.3, 0.2, True, False)} and seeds == [0] and dropout == {True} and decay == {0.01}


def test_flags_of_the_seeding_and_of_appendix_e_reach_them(monkeypatch):
    words = "--num_classes appendix_e --max_classes 12 --min_cluster 3 --kappa 7 --swaps 9"
    args = parse_args(train_imbanid.Args, words.split())
    meta, got = {"num_classes": 8, "num_known": 4, "num_unlabelled": 90, "num_test": 90, "labeled_ratio": 0.2}, []
    monkeypatch.setattr(train_imbanid, "appendix_e", lambda z, *given: got.append(given) or 5)
    train_imbanid.resolve_num_classes(args, {"train": torch.zeros(2, 2)}, {}, meta, 0)
    assert got == [(4, 12, 3, 0)] and train_imbanid.seeding_settings(args, meta) == (7.0, 5.0, 9, 0.2)


def test_without_an_epoch_the_seeded_head_is_what_there_is(tiny_run):
    results, out = train(tiny_run[0], "--epochs", 0, "--tag", "no_training")
    head = torch.load(out / "last.pt", weights_only=True)["head"]
    found = (torch.from_numpy(np.load(out / "test_feature.npy")) @ normalize(head, dim=1).T).argmax(1)
    assert np.array_equal(found, np.load(out / "test_pred.npy")) and results["epochs"] == 0
    assert (out / "log.jsonl").read_bytes() == b""


def test_a_run_without_an_epoch_that_was_killed_after_its_checkpoint_ends_the_same(tiny_run):
    """MOT's shares have moved once by then, and do not a second time."""
    flags = ("--epochs", 0, "--pseudo_label", "mot", "--mu", 0.5, "--tag", "no_training_by_mot")
    results, out = train(tiny_run[0], *flags)
    before = {name: (out / name).read_bytes() for name in ("beta.npy", "confidence.npy", "pseudo_label.npy")}
    (out / "results.json").unlink()
    assert train(tiny_run[0], *flags)[0]["train_unlabelled"] == results["train_unlabelled"]
    assert {name: (out / name).read_bytes() for name in before} == before


def test_an_encoder_whose_tokenizer_has_more_tokens_than_its_model(tiny_encoder, tmp_path):
    folder = shutil.copytree(tiny_encoder, tmp_path / "encoder")
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"word{i}" for i in range(200)])
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match="its tokenizer has"):
        Encoder(str(folder), 32, torch.device("cpu"), torch.float32)


def test_what_the_estimate_is_given_and_its_bounds(monkeypatch):
    got, args = [], train_imbanid.Args(num_classes="auto", seed=3)
    meta = {"num_classes": 8, "num_known": 4, "num_unlabelled": 90, "num_test": 60, "labeled_ratio": 0.2}
    monkeypatch.setattr(train_imbanid, "estimate_num_classes", lambda *given: got.append(given) or 70)
    z, label = ({split: torch.full((2, 2), value) for split, value in (("train", a), ("dev", a + 1))} for a in (0.0, 5.0))
    assert train_imbanid.resolve_num_classes(args, z, label, meta, 0) == 60, "of a benchmark k-means is fitted on test too"
    assert train_imbanid.resolve_num_classes(args, z, label, {**meta, "own": True, "num_dev": 3}, 0) == 70
    for given, sizes in zip(got, (0.2, 0.0), strict=True):  # nobody says how an own table's labelled rows were chosen
        assert given[:4] == (z["train"], label["train"], z["dev"], label["dev"])
        assert given[4:] == ((30.0, 5.0, 300, sizes), 3)


def test_batches_are_of_one_size_and_the_log_is_of_means(tiny_run, monkeypatch):
    sizes, parts, step, loss_of = [], [], pretrain.joint_step, train_imbanid.batch_loss
    monkeypatch.setattr(pretrain, "joint_step", lambda loss, optimizer, where, rows, *more: sizes.append(len(rows)) or step(
        loss, optimizer, where, rows, *more))

    def batch_loss(*given):
        found = loss_of(*given)
        parts.append([float(x) for x in found[1:]])
        return found

    monkeypatch.setattr(train_imbanid, "batch_loss", batch_loss)
    _, out = train(tiny_run[0], "--epochs", 1, "--batch_size", 150, "--tau_g", 0.2, "--tag", "batches")
    state = torch.load(out / "last.pt", weights_only=True)
    assert sizes == [87, 87]
    assert [state["log"][0][key] for key in ("contrastive", "ce")] == pytest.approx(np.mean(parts, 0), rel=1e-5)
    beta = state["assigned"][2]
    assert [state["log"][0][key] for key in ("beta_min", "beta_max")] == pytest.approx([float(beta.min()), float(beta.max())])


def test_shares_of_kmeans_sum_to_one():
    z = normalize(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    result = train_imbanid.kmeans_result(z, z[:4], 40, 0)
    assert torch.allclose(result.beta.float(), result.plan.argmax(1).bincount(minlength=4) / 40)


def test_the_seeding_reads_pre_trained_features(tiny_run, tiny_encoder, tmp_path, monkeypatch):
    words = *tiny_run[0][:-1], tmp_path, "--encoder", tiny_encoder, *TINY_PRETRAIN, "--lr", 0.01
    pretrain.main(parse_args(pretrain.Args, [str(word) for word in words]))
    given, seed = [], train_imbanid.seed_centres
    monkeypatch.setattr(train_imbanid, "seed_centres", lambda z, *more: given.append(z) or seed(z, *more))
    _, out = train((*tiny_run[0][:-1], tmp_path), "--epochs", 0)
    assert np.allclose(given[0], np.load(out / "train_feature.npy"), atol=1e-3)


def test_new_texts_get_the_heads_probabilities(tiny_run):
    _, out = train(tiny_run[0], "--head_lr", 3.0, "--tag", "labeller")
    state, z = torch.load(out / "last.pt", weights_only=True), torch.from_numpy(np.load(out / "test_feature.npy"))
    texts = [row[0] for row in read_tsv(tiny_run[1] / "data/demo_g4_s0/test.tsv")[1:]]
    cluster, names, shares = Labeller(state, {k: str(k) for k in range(8)}, "cpu", "float32")(texts)
    best = (z @ normalize(state["head"], dim=1).T / state["config"]["temperature"]).softmax(1).topk(3, dim=1)
    assert torch.allclose(torch.tensor(shares), best.values, atol=1e-4) and cluster == best.indices[:, 0].tolist()
    assert [[int(name) for name in row] for row in names] == best.indices.tolist()


def test_pseudo_labels_are_confident_at_the_heads_temperature(tiny_run):
    _, out = train(tiny_run[0], "--epochs", 0, "--temperature", 0.2, "--tag", "warm")
    head = torch.load(out / "last.pt", weights_only=True)["head"]
    z = torch.from_numpy(np.load(out / "train_feature.npy")).float()
    label, q = (torch.from_numpy(np.load(out / f"{name}.npy")) for name in ("pseudo_label", "confidence"))
    chance = (z @ normalize(head, dim=1).T / 0.2).softmax(1).gather(1, label[:, None])[:, 0]
    assert (q < 1).sum() > 100 and torch.allclose(q[q < 1], chance[q < 1], atol=5e-3)


def test_mot_goes_on_from_the_shares_before_and_dr_has_those_of_the_transport(tiny_run, monkeypatch):
    given, made, selected, plan, select = [], [], [], train_imbanid.transport_plan, train_imbanid.select_clean

    def transport_plan(log_p, args, potential, marginal):
        given.append(marginal)
        made.append(plan(log_p, args, potential, marginal))
        return made[-1]

    monkeypatch.setattr(train_imbanid, "transport_plan", transport_plan)
    monkeypatch.setattr(train_imbanid, "select_clean", lambda *told: selected.append(told[2]) or select(*told))
    train(tiny_run[0], "--pseudo_label", "mot", "--mu", 0.5, "--tag", "mot_shares")
    assert given[0].tolist() == [1 / 8] * 8 and len(given) == 3
    for before, (result, following), after, beta in zip(given, made, given[1:], selected, strict=False):
        assert torch.equal(after, following) and not torch.equal(after, before) and torch.equal(beta, result.beta)


def test_lr_is_of_the_layer_and_head_lr_of_the_head(tiny_run):
    def state(*flags):
        _, out = train(tiny_run[0], "--tag", f"rates{len(flags)}{flags[-1]}", *flags)
        saved = torch.load(out / "last.pt", weights_only=True)
        return torch.cat([p.flatten() for p in saved["trained_layers"].values()]), saved["head"]

    layer, head = state("--epochs", 0)
    for lr, head_lr in ((1e-12, 0.01), (0.01, 1e-12)):
        trained, cluster = state("--epochs", 1, "--lr", lr, "--head_lr", head_lr)
        assert ((trained - layer).abs().max() > 1e-3) == (lr > head_lr) == ((cluster - head).abs().max() < 1e-3)


def test_the_kmeans_rows_are_of_raw_and_of_pre_trained_features(tiny_run, tiny_encoder, monkeypatch):
    given, rows = [], train_imbanid.kmeans_rows
    monkeypatch.setattr(train_imbanid, "kmeans_rows", lambda *told: given.append(told) or rows(*told))
    train(tiny_run[0], "--epochs", 0, "--restart", "--tag", "rows_of")  # which takes no kept rows
    (raw, label, _, _, _, pretrained), = given
    encoder = Encoder(str(tiny_encoder), 32, torch.device("cpu"), torch.float32)
    tokens = encoder.tokenize([row[0] for row in read_tsv(tiny_run[1] / "data/demo_g4_s0/test.tsv")[1:]])
    assert torch.allclose(raw["test"], normalize(encoder.all_features(encoder.trunk(tokens)), dim=1), atol=1e-5)
    pretrain.load_trained_layers(encoder, pretrain.load_checkpoint(tiny_run[1] / "out/demo_g4_s0/pretrain.pt"))
    assert torch.allclose(pretrained["test"], normalize(encoder.all_features(encoder.trunk(tokens)), dim=1), atol=1e-5)
    assert not torch.allclose(raw["test"], pretrained["test"], atol=1e-4)
    assert np.array_equal(label.numpy(), np.load(tiny_run[1] / "data/demo_g4_s0/train_label.npy"))


def test_stage_3_reads_as_many_tokens_as_stage_1(tiny_run, tmp_path, monkeypatch):
    pre = pretrain.load_checkpoint(tiny_run[1] / "out/demo_g4_s0/pretrain.pt")
    (tmp_path / "demo_g4_s0").mkdir()
    pretrain.save_checkpoint(tmp_path / "demo_g4_s0/pretrain.pt", **pre | {"config": pre["config"] | {"max_length": 5}})
    seen, tokenize = [], Encoder.tokenize
    monkeypatch.setattr(Encoder, "tokenize", lambda self, texts: seen.append(tokenize(self, texts)) or seen[-1])
    train((*tiny_run[0][:-1], tmp_path), "--epochs", 0)
    assert max(int(tokens.lengths.max()) for tokens in seen[1:]) == 5  # the first is the encoder's own check


def test_every_draw_of_both_stages_is_by_the_seed(tiny_run, tiny_encoder, tmp_path, monkeypatch):
    """The same data and settings under another seed: no generator starts where one of seed 0 starts."""
    drawn = {}

    def listen(owner, name, seed_of):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **more: drawn.setdefault((name, owner), [set(), set()])[seed].add(
            seed_of(given)) or real(*given, **more))

    for owner, name, place in ((train_imbanid, "seed_centres", -1), (train_imbanid, "kmeans_rows", 4),
                               (train_imbanid, "kmeans", 2), (train_imbanid, "appendix_e", 4),
                               (train_imbanid, "seed_epoch", 0), (pretrain, "seed_epoch", 0), (torch, "manual_seed", 0)):
        listen(owner, name, lambda given, place=place: given[place])
    for name in ("mask_tokens", "replace_tokens"):
        listen(Encoder, name, lambda given: given[-1].initial_seed())
    monkeypatch.setattr(pretrain, "SAVE_STEPS", 2)
    for seed in (0, 1):
        data = shutil.copytree(tiny_run[1] / "data/demo_g4_s0", tmp_path / f"data/demo_g4_s{seed}")
        (data / "meta.json").write_text(json.dumps(json.loads((data / "meta.json").read_text()) | {"seed": seed}))
        task = ["--dataset", "demo", "--gamma", 4, "--seed", seed, "--data_dir", tmp_path / "data", "--out_dir", tmp_path]
        for stage, flags in ((pretrain, (*TINY_PRETRAIN, "--encoder", tiny_encoder)),
                             (train_imbanid, (*TINY_TRAIN, "--num_classes", "appendix_e"))):
            stage.main(parse_args(stage.Args, [str(word) for word in (*task, *flags, "--epochs", 1)]))
    assert len(drawn) == 9 and all(one and other and one.isdisjoint(other) for one, other in drawn.values()), drawn
