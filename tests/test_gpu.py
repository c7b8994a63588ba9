"""That every tensor lies where it should, shown on a pretended GPU (pretend_gpu.py)."""
import importlib
import shutil

import numpy as np
import pytest
import torch
from conftest import TINY_PRETRAIN, TINY_TRAIN
from pretend_gpu import GPU, pretend_gpu
from tiny import make_encoder

import predict
import pretrain
import train_imbanid
from encoder import Encoder
from make_lt_data import parse_args

NAMES = ("gcd", "deepaligned", "clnn", "dpn", "latentem", "usnid", "kmeans")


def run(module, *words):
    module.main(parse_args(module.Args, [str(word) for word in words]))


def test_the_pretended_gpu_refuses_what_a_real_one_refuses(monkeypatch):
    with pretend_gpu(monkeypatch):
        x, y = torch.arange(6.0).to(GPU), torch.ones(6)
        assert x.device == GPU and (x + 1 + torch.tensor(2.0)).tolist() == [3, 4, 5, 6, 7, 8]
        assert torch.zeros(2, device=GPU).device == GPU and x[torch.tensor([1, 2])].cpu().numpy().tolist() == [1, 2]
        x.add_(1)
        assert x.tolist()[0] == 1 and float(x.sum()) == 21 and x.to("cpu").device.type == "cpu"
        for wrong in (lambda: x + y, lambda: y[x.long()], lambda: torch.cat([x, y]), lambda: x.numpy(), lambda: y.add_(x),
                      lambda: torch.where(x > 1, y, y), lambda: torch.rand(3, device=GPU, generator=torch.Generator()),
                      lambda: torch.multinomial(x, 2, generator=torch.Generator())):
            with pytest.raises((RuntimeError, TypeError)):
                wrong()


def test_one_process_locks_its_folder_without_the_gpu(tmp_path):
    """Here there is none: what asked for it would fail. Why one cannot be used is said where the model is moved to it."""
    reached = []
    pretrain.on_all_processes(torch.device("cuda"), {}, tmp_path / "out", lambda *where: reached.append(where))
    assert reached == [(0, 1, torch.device("cuda"))]


def test_both_stages_on_a_gpu(monkeypatch, tiny_run, calm_encoder, tmp_path):
    """Without dropout, which a GPU draws in another way, pre-training has the CPU's losses. Stage 3 ends in all its forms."""
    monkeypatch.setattr(pretrain, "SAVE_STEPS", 1)  # so that checkpoints from within an epoch are written too
    here, there = ((*tiny_run[0][:-1], tmp_path / side) for side in ("cpu", "gpu"))
    run(pretrain, *here, "--encoder", calm_encoder, *TINY_PRETRAIN)
    with pretend_gpu(monkeypatch, "pretrain", "train_imbanid"):
        run(pretrain, *there, "--encoder", calm_encoder, *TINY_PRETRAIN)
        for kind, flags in (("rot", ("--no_cache",)), ("kmeans", ("--num_classes", "auto")), ("mot", ()),
                            ("eot", ("--num_classes", "appendix_e"))):
            run(train_imbanid, *there, *TINY_TRAIN, "--pseudo_label", kind, *flags, "--tag", f"by_{kind}")
            assert np.load(tmp_path / f"gpu/demo_g4_s0_by_{kind}/beta.npy").sum() == pytest.approx(1)
    logs = [torch.load(task[-1] / "demo_g4_s0/pretrain.pt", weights_only=True)["log"] for task in (there, here)]
    for line, expected in zip(*logs, strict=True):
        assert line == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("mpnet", [False, True])
def test_a_batch_on_a_gpu_is_that_on_the_cpu(monkeypatch, tmp_path, mpnet):
    """Plan, clean rows, loss and gradient of stage 3, all from the same numbers."""
    make_encoder(tmp_path, mpnet=mpnet)
    scores = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)).log_softmax(1)
    first_head = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    texts = ["pay " + "my bill " * (i % 5) + str(i) for i in range(12)]

    def batch(device):
        encoder = Encoder(str(tmp_path), 32, device, torch.float32).eval()
        tokens, args = encoder.tokenize(texts), train_imbanid.Args()
        view = encoder.trunk(encoder.replace_tokens(tokens, 0.5, torch.Generator().manual_seed(0)))
        log_p, head = scores.to(device), torch.nn.Parameter(first_head.to(device))
        result, _ = train_imbanid.transport_plan(log_p, args, None, None)
        label = result.plan.argmax(1)
        confidence = log_p.gather(1, label[:, None])[:, 0].exp()
        clean = train_imbanid.select_clean(label, confidence, result.beta)
        rows = torch.arange(12, device=device)
        loss, *_ = train_imbanid.batch_loss(encoder, head, encoder.trunk(tokens), view, rows, label, confidence, clean, args)
        loss.backward()
        trained = [p for p in (head, *encoder.trained_layers.parameters()) if p.grad is not None]
        return [x.detach().to("cpu").double() for x in (result.plan, clean, loss, *(p.grad for p in trained))]

    here = batch(torch.device("cpu"))
    with pretend_gpu(monkeypatch):
        there = batch(GPU)
    for one, other in zip(here, there, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_compared_methods_on_a_gpu(monkeypatch, tiny_run, tiny_encoder, tmp_path, short_ends, name):
    """They end. Where their numbers lie is what is asked here, not what they are."""
    shutil.copytree(tiny_run[1] / "out/demo_g4_s0", tmp_path / "demo_g4_s0")
    module = importlib.import_module(f"baselines.{name}")
    task = (*tiny_run[0][:-1], tmp_path, "--encoder", tiny_encoder, "--max_length", 32, "--dtype", "float32")
    flags = ("--semi_supervised",) if name == "kmeans" else ("--epochs", 2)
    flags += ("--pretrain_epochs", 2) if name in ("deepaligned", "dpn", "usnid") else ()
    with pretend_gpu(monkeypatch, "pretrain"):
        run(module, *task, *flags)
    found = np.load(tmp_path / f"demo_g4_s0_{name}/test_pred.npy")
    assert len(found) == 80 and found.min() >= 0 and found.max() < 8


def test_new_texts_are_labelled_on_a_gpu(monkeypatch, tiny_run, tmp_path):
    run(train_imbanid, *tiny_run[0], *TINY_TRAIN, "--tag", "gpu")
    out = tiny_run[1] / "out/demo_g4_s0_gpu"
    (tmp_path / "new.txt").write_text("my card was declined\nbalance\nno signal\n")
    words = (out, tmp_path / "new.txt", "--data_dir", tiny_run[1] / "data", "--dtype", "float32", "-o")
    predict.main([str(out), "--data_dir", str(tiny_run[1] / "data")])
    predict.main([str(word) for word in (*words, tmp_path / "cpu.csv")])
    with pretend_gpu(monkeypatch, "predict"):
        predict.main([str(word) for word in (*words, tmp_path / "gpu.csv")])
    assert (tmp_path / "gpu.csv").read_text() == (tmp_path / "cpu.csv").read_text()
