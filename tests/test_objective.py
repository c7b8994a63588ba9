"""What the two stages minimise and report, against the formulas, worked out one anchor, one token, one row at a time."""
import itertools
import json
import math

import numpy as np
import pytest
import torch
from conftest import TINY_PRETRAIN, TINY_TRAIN, script
from torch.nn.functional import cross_entropy, normalize

import pretrain
import train_imbanid
from encoder import Encoder
from losses import class_wise_loss, instance_wise_loss
from make_lt_data import parse_args
from metrics import cluster_metrics
from rot import moving_average_marginal, relaxed_ot
from seeding import kmeans, kmeans_rows, nearest, semi_supervised_kmeans

TEXTS = ["open the door", "set an alarm for six in the morning", "play", "turn the lights off", "what time is it", "stop"]


@pytest.fixture
def calm(tiny_encoder):
    return Encoder(str(tiny_encoder), 32, torch.device("cpu"), torch.float32).eval()


def test_a_batch_has_the_loss_of_eq_12(calm):
    draw = torch.Generator().manual_seed(0)
    tokens = calm.tokenize(TEXTS)
    hidden, view = calm.trunk(tokens), calm.trunk(calm.replace_tokens(tokens, 0.5, draw))
    head, q = torch.randn(3, 32, generator=draw), torch.rand(6, generator=draw)
    label, clean = torch.tensor([0, 0, 1, 0, 2, 1]), torch.tensor([True, True, True, False, True, True])
    args = train_imbanid.Args(omega=0.9, tau=0.3, temperature=0.2)
    rows = torch.arange(6)
    loss, contrastive, ce = train_imbanid.batch_loss(calm, head, hidden, view, rows, label, q, clean, args)
    z = normalize(torch.stack([calm.features(hidden, rows), calm.features(view, rows)], 1), dim=2).detach().double()
    anchors, total = list(itertools.product(range(6), (0, 1))), 0.0
    for i, v in anchors:
        score = {(j, w): float(z[i, v] @ z[j, w]) / args.tau for j, w in anchors if (j, w) != (i, v)}
        log_sum = math.log(sum(map(math.exp, score.values())))
        positive = [(j, w) for j, w in score if j != i and label[j] == label[i] and clean[i] and clean[j]]
        cwcl = sum(float(q[i] * q[j]) * (log_sum - score[j, w]) for j, w in positive)
        total += (cwcl + log_sum - score[i, 1 - v]) / (1 + len(positive))
    logits = z[clean].flatten(0, 1) @ normalize(head, dim=1).double().T / args.temperature
    by_hand = -logits.log_softmax(1)[torch.arange(10), label[clean].repeat_interleave(2)].mean()
    contrastive, ce = float(contrastive), float(ce)
    assert contrastive == pytest.approx(total / 12, rel=1e-4) and ce == pytest.approx(float(by_hand), rel=1e-4)
    assert float(loss.detach()) == pytest.approx(0.9 * contrastive + 0.1 * ce, rel=1e-5)


def test_each_name_of_a_transport_solves_its_own_problem():
    log_p = (3 * torch.randn(60, 5, generator=torch.Generator().manual_seed(1)) - torch.arange(5)).log_softmax(1)
    marginal = torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1], dtype=torch.float64)
    found = {}
    for name, penalty in (("rot", "reverse_kl"), ("eot", "kl"), ("cot", "equality"), ("mot", "equality")):
        args = train_imbanid.Args(pseudo_label=name, lambda1=0.1, lambda2=0.3, mu=0.7)
        result, following = train_imbanid.transport_plan(log_p, args, None, marginal)
        prior = moving_average_marginal(marginal, log_p, 0.7) if name == "mot" else None
        assert torch.equal(following, marginal if prior is None else prior)
        assert torch.equal(result.plan, relaxed_ot(log_p, 0.1, 0.3, penalty=penalty, prior=prior).plan)
        found[name] = result.beta
    assert all((found[a] - found[b]).abs().sum() > 0.01 for a, b in itertools.combinations(found, 2))


def test_lambda2_is_the_papers_where_none_is_given():
    for gamma, given, expected in ((1, None, 7), (3, None, 2), (10, None, 2), (1, 0.5, 0.5), (10, 0.5, 0.5)):
        words = ["--gamma", str(gamma), *(["--lambda2", str(given)] if given else [])]
        assert train_imbanid.lambda2_of(parse_args(train_imbanid.Args, words)) == expected


def test_saved_arrays_and_rows_of_the_results_belong_together(tiny_run):
    """The headline is protocol C of the saved head and features, T is k-means on the same, confidence is the head's."""
    task, folder = tiny_run
    train_imbanid.main(parse_args(train_imbanid.Args, [str(word) for word in (*task, *TINY_TRAIN, "--tag", "arrays")]))
    out, data = folder / "out/demo_g4_s0_arrays", folder / "data/demo_g4_s0"
    saved = {path.stem: np.load(path) for path in out.glob("*.npy")}
    truth, label, counts = (np.load(data / f"{name}.npy") for name in ("test_label", "train_label", "class_counts"))
    results, state = json.loads((out / "results.json").read_text()), torch.load(out / "last.pt", weights_only=True)
    N, M, K, num_known = len(label), len(truth), len(counts), int(label.max()) + 1
    assert {name: (array.dtype.name, array.shape) for name, array in saved.items()} == {
        "pseudo_label": ("int64", (N,)), "confidence": ("float32", (N,)), "beta": ("float64", (K,)),
        "train_feature": ("float16", (N, 32)), "test_feature": ("float32", (M, 32)), "test_pred": ("int64", (M,))}
    head = normalize(state["head"], dim=1).numpy()
    assert np.array_equal(saved["test_pred"], (saved["test_feature"] @ head.T).argmax(1))
    by_kmeans = kmeans(torch.from_numpy(saved["test_feature"]), K, 0)[1].numpy()
    for row, found in (("test", saved["test_pred"]), ("test_kmeans", by_kmeans)):
        assert results[row] == pytest.approx(cluster_metrics(truth, found, num_known, counts))
    assert results["test"] != results["test_kmeans"] and np.isclose(saved["beta"].sum(), 1)
    logits = saved["train_feature"].astype(np.float32) @ head.T / state["config"]["temperature"]
    chance, hidden = torch.from_numpy(logits).softmax(1).numpy(), label < 0
    its_own = chance[np.arange(N), saved["pseudo_label"]]
    assert np.allclose(saved["confidence"][hidden], its_own[hidden], atol=5e-3)
    assert (its_own[hidden] < chance[hidden].max(1) - 0.02).any(), "no row tells the pseudo-label's from the largest"


def test_the_kmeans_rows_stand_in_their_order():
    draw = torch.Generator().manual_seed(2)
    raw, pretrained = ({"train": normalize(torch.randn(80, 4, generator=draw), dim=1),
                        "test": normalize(torch.randn(30, 4, generator=draw), dim=1)} for _ in range(2))
    label = torch.where(torch.arange(80) < 30, torch.arange(80) % 3, -1)
    rows = kmeans_rows(raw, label, 6, 3, 0, pretrained)
    plain, held = kmeans(raw["train"], 6, 0, n_init=3)[0], semi_supervised_kmeans(raw["train"], label, 6, 3, 0)
    last = kmeans(pretrained["train"], 6, 0, n_init=3)[0]
    for row, z, centre in zip(rows, (raw, raw, pretrained), (plain, held, last), strict=True):
        assert np.array_equal(row, nearest(z["test"], centre).numpy())
    assert len({row.tobytes() for row in rows}) == 3


def test_the_language_model_loss_is_that_of_the_whole_model(calm, tiny_encoder):
    """Over the words of the corpus: the logits of the model in full, of which the others are left out."""
    from transformers import AutoModelForMaskedLM
    whole = AutoModelForMaskedLM.from_pretrained(tiny_encoder).eval()
    tokens = calm.tokenize(TEXTS)
    calm.limit_vocabulary(tokens)
    masked, target = calm.mask_tokens(tokens, torch.Generator().manual_seed(5))
    loss, count = calm.mlm_loss(calm.trunk(masked), torch.arange(len(TEXTS)), target)
    used, losses = tokens.values.unique(), []
    for start, end in itertools.pairwise(tokens.offsets.tolist()):
        logits = whole(input_ids=masked.values[None, start:end]).logits[0][:, used].log_softmax(1)
        losses += [-logits[t, used == word] for t, word in enumerate(target.values[start:end]) if word >= 0]
    assert count == len(losses) > 1
    assert float(loss.detach()) == pytest.approx(float(torch.cat(losses).mean().detach()), rel=1e-4)


def test_pre_training_lowers_both_of_its_losses(tiny_run, calm_encoder, tmp_path):
    """And each moves the trained layer: alone, the other is not."""
    states = {}
    for name, flags in (("both", ()), ("no_mlm", ("--no_mlm",)), ("no_ce", ("--labeled_batch_size", 1, "--temperature", 1e6))):
        words = (*tiny_run[0][:-1], tmp_path / name, "--encoder", calm_encoder, *TINY_PRETRAIN, "--epochs", 8, "--lr", 0.003,
                 "--head_lr", 0.03, *flags)
        script("pretrain.py", *words)
        states[name] = torch.load(tmp_path / name / "demo_g4_s0/pretrain.pt", weights_only=True)
    first, *_, last = states["both"]["log"]
    assert last["ce"] < 0.8 * first["ce"] and last["mlm"] < 0.95 * first["mlm"]
    assert states["no_mlm"]["log"][-1]["mlm"] == 0 and states["no_mlm"]["log"][-1]["ce"] < 0.8 * first["ce"]
    assert states["no_ce"]["log"][-1]["mlm"] < 0.95 * first["mlm"]
    layers = [torch.cat([p.flatten() for p in state["trained_layers"].values()]) for state in states.values()]
    assert all((a - b).abs().max() > 1e-3 for a, b in itertools.combinations(layers, 2))


@pytest.mark.parametrize("available", [True, False])
def test_the_device_is_a_gpu_where_there_is_one(monkeypatch, available):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert pretrain.pick_device("auto").type == ("cuda" if available else "cpu") and pretrain.pick_device("cpu").type == "cpu"
    if available:
        assert pretrain.pick_device("cuda").type == "cuda"
    else:
        with pytest.raises(pretrain.UserError, match="no GPU"):
            pretrain.pick_device("cuda")


def test_a_batch_of_pre_training_has_the_loss_of_eq_2(calm):
    draw, tokens, rows = torch.Generator().manual_seed(0), calm.tokenize(TEXTS), torch.arange(6)
    masked, target = calm.mask_tokens(tokens, torch.Generator().manual_seed(5))
    hidden, masked = calm.trunk(tokens), calm.trunk(masked)
    classifier, label = torch.randn(2, 32, generator=draw), torch.tensor([0, 1, -1, 1, -1, 0])
    drawn, args = torch.tensor([0, 3, 3, 5]), pretrain.Args(temperature=0.2)
    ce, mlm = pretrain.batch_loss(calm, classifier, hidden, masked, target, label, rows, drawn, args, 0, 1)
    logits = normalize(calm.features(hidden, drawn), dim=1) @ normalize(classifier, dim=1).T / 0.2
    assert float(ce.detach()) == pytest.approx(float(cross_entropy(logits, label[drawn]).detach()), rel=1e-5)
    assert float(mlm.detach()) == pytest.approx(float(calm.mlm_loss(masked, rows, target)[0].detach()), rel=1e-5)


def test_each_switch_takes_its_own_term_off_the_contrastive_loss(calm):
    tokens, rows, draw = calm.tokenize(TEXTS), torch.arange(6), torch.Generator().manual_seed(0)
    hidden, view = calm.trunk(tokens), calm.trunk(calm.replace_tokens(tokens, 0.5, draw))
    label, q, clean = torch.tensor([0, 0, 1, 0, 2, 1]), torch.rand(6, generator=draw), torch.ones(6, dtype=torch.bool)
    z = normalize(torch.stack([calm.features(hidden, rows), calm.features(view, rows)], 1), dim=2)

    def contrastive(**flags):
        args = train_imbanid.Args(tau=0.3, **flags)
        return float(train_imbanid.batch_loss(calm, torch.eye(3, 32), hidden, view, rows, label, q, clean, args)[1])

    cwcl, of = class_wise_loss(z, label, q, clean, 0.3)
    assert contrastive(no_cwcl=True) == pytest.approx(float(instance_wise_loss(z, 0.3).mean().detach()), rel=1e-5)
    assert contrastive(no_iwcl=True) == pytest.approx(float((cwcl / (1 + of)).mean().detach()), rel=1e-5)
    cwcl, of = class_wise_loss(z, label, q, clean, 0.3, adaptive_weight=False)
    plain = contrastive(no_iwcl=True, no_adaptive_weight=True)
    assert plain == pytest.approx(float((cwcl / (1 + of)).mean().detach()), rel=1e-5)


def test_a_transport_without_a_lambda2_takes_the_papers():
    log_p = (3 * torch.randn(60, 5, generator=torch.Generator().manual_seed(1)) - torch.arange(5)).log_softmax(1)
    for gamma, lambda2 in ((1.0, 7.0), (10.0, 2.0)):
        result, _ = train_imbanid.transport_plan(log_p, train_imbanid.Args(gamma=gamma), None, None)
        assert torch.equal(result.beta, relaxed_ot(log_p, 0.05, lambda2).beta)
