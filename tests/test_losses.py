import inspect
import math

import numpy as np
import pytest
import torch

from losses import class_wise_loss, contrastive_objective, instance_wise_loss, select_clean


def batch(B=7, V=2, H=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    z = torch.nn.functional.normalize(torch.randn(B, V, H, generator=generator, dtype=torch.float64), dim=-1)
    label = torch.tensor([0, 0, 1, 1, 2, 0, 1])[:B]  # row 4 has no positive
    confidence = torch.rand(B, generator=generator, dtype=torch.float64)
    clean = torch.tensor([1, 1, 1, 0, 1, 1, 1], dtype=torch.bool)[:B]  # row 3 is noisy
    return z, label, confidence, clean


def naive(z, label, q, clean, tau, adaptive):
    """Eq. 10 and 11 with nothing but loops."""
    B, V, _ = z.shape
    cwcl, iwcl, size = torch.zeros(B, V), torch.zeros(B, V), torch.zeros(B, V)
    for i in range(B):
        for v in range(V):
            others = [(j, u) for j in range(B) for u in range(V) if (j, u) != (i, v)]
            total = sum(math.exp(float(z[i, v] @ z[j, u]) / tau) for j, u in others)
            for j, u in others:
                log_p = math.log(math.exp(float(z[i, v] @ z[j, u]) / tau) / total)
                if j == i:
                    iwcl[i, v] -= log_p / (V - 1)
                elif label[i] == label[j] and clean[i] and clean[j]:
                    cwcl[i, v] -= log_p * (float(q[i] * q[j]) if adaptive else 1)
                    size[i, v] += 1
    return cwcl, iwcl, size


@pytest.mark.parametrize("V,adaptive", [(2, True), (2, False), (3, True)])
def test_against_the_double_loop(V, adaptive):
    z, label, q, clean = batch(V=V)
    cwcl, size = class_wise_loss(z, label, q, clean, 0.2, adaptive)
    expected = naive(z, label, q, clean, 0.2, adaptive)
    for found, wanted in zip((cwcl, instance_wise_loss(z, 0.2), size), expected):
        assert torch.allclose(found.float(), wanted, atol=1e-5)
    assert torch.allclose(contrastive_objective(cwcl, instance_wise_loss(z, 0.2), size).float(),
                          (expected[0] + expected[1]) / (1 + expected[2]), atol=1e-5)


def test_gradients():
    z, label, q, clean = batch(5, 2, 3)
    z = z.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: class_wise_loss(x, label, q, clean, 0.5)[0], z)
    assert torch.autograd.gradcheck(lambda x: instance_wise_loss(x, 0.5), z)


def test_no_gradient_reaches_the_confidence_and_that_of_a_noisy_row_may_be_nan():
    z, label, q, clean = batch()
    q = q.masked_fill(~clean, math.nan).requires_grad_()
    class_wise_loss(z.requires_grad_(), label, q, clean)[0].sum().backward()
    assert q.grad is None and z.grad.isfinite().all()


def test_an_anchor_without_positives_has_no_loss_and_no_nan():
    z, label, q, clean = batch()
    z = z.requires_grad_()
    loss, size = class_wise_loss(z, label, q, clean, 0.07)
    for row in (3, 4):  # noisy; alone in its class
        assert (loss[row] == 0).all() and (size[row] == 0).all()
    loss.sum().backward()
    assert z.grad.isfinite().all()
    alone, zero = class_wise_loss(z.detach()[:1], label[:1], q[:1], clean[:1], 0.07)
    assert (alone == 0).all() and (zero == 0).all()


def test_what_a_noisy_row_holds_does_not_matter_and_minus_one_is_no_class():
    z, label, q, clean = batch()
    expected = class_wise_loss(z, label, q, clean)[0]
    assert torch.equal(class_wise_loss(z, label, torch.where(clean, q, math.nan), clean)[0], expected) and not clean.all()
    loss, size = class_wise_loss(z, torch.full_like(label, -1), q, torch.ones_like(clean))
    assert (loss == 0).all() and (size == 0).all()


def test_class_0_is_a_class_like_any_other():
    z, label, q, clean = batch()
    assert torch.allclose(class_wise_loss(z, label, q, clean)[0], class_wise_loss(z, label + 5, q, clean)[0])
    assert (class_wise_loss(z, label, q, clean)[1][0] == 4).all()  # rows 1 and 5, two views each


def test_gather_gives_the_loss_of_the_whole_batch():
    """Two halves that see each other through gather sum to the single-process loss and gradient."""
    z, label, q, clean = batch(6)
    whole = z.clone().requires_grad_()
    loss = class_wise_loss(whole, label, q, clean)[0].sum() + instance_wise_loss(whole).sum()
    loss.backward()
    split = z.clone().requires_grad_()
    total = 0
    for own, rest in ((slice(0, 2), slice(2, 6)), (slice(2, 6), slice(0, 2))):
        def gather(x, rest=rest):
            whole = next(s for s in (split, label, q, clean) if s.dtype == x.dtype and s.ndim == x.ndim)
            return torch.cat([x, whole[rest]])
        total = total + class_wise_loss(split[own], label[own], q[own], clean[own], gather=gather)[0].sum()
        total = total + instance_wise_loss(split[own], gather=gather).sum()
    total.backward()
    assert torch.allclose(total, loss) and torch.allclose(split.grad, whole.grad)


def test_select_clean_worked_by_hand():
    label = torch.tensor([0, 0, 0, 0, 1, 1, 0])
    confidence = torch.tensor([0.5, 0.95, 0.3, 0.6, 0.2, 0.1, 0.6])
    beta = torch.tensor([0.5, 0.5])
    # N rho beta = 7 * 0.4 * 0.5 = 1.4 -> 2 a class: rows 1 and 3 (the first of two at 0.6) of class 0, both of class 1
    assert select_clean(label, confidence, beta, 0.4, 0.9, use_qr=False).tolist() == [0, 1, 0, 1, 1, 1, 0]
    assert select_clean(label, confidence, beta, 0.4, 0.9, use_dr=False).tolist() == [0, 1, 0, 0, 0, 0, 0]
    assert select_clean(label, confidence, beta, 0.4, 0.55).tolist() == [0, 1, 0, 1, 1, 1, 1]  # the union
    assert select_clean(label, confidence, beta, use_dr=False, use_qr=False).all()
    shown = torch.tensor([0, 0, 1, 0, 0, 0, 0], dtype=torch.bool)
    assert select_clean(label, confidence, beta, 0.4, 0.9, use_qr=False, labelled=shown).tolist() == [0, 1, 1, 0, 1, 1, 0]
    same = torch.tensor([0, 0, 0, 0]), torch.tensor([1, 1, 0.5, 1]), torch.tensor([0.5, 0.5]), 1.0
    assert select_clean(*same, use_qr=False, labelled=torch.tensor([0, 0, 0, 1]) > 0).tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("word,changed", [
    ("confidence", {"confidence": torch.tensor([0.5, math.nan])}), ("confidence", {"confidence": torch.ones(3)}),
    ("beta", {"beta": torch.tensor([0.5, math.nan])}), ("label", {"label": torch.tensor([0, 2])}),
    ("label", {"label": torch.tensor([0, -1])}), ("rho", {"rho": math.nan}), ("rho", {"rho": -1}),
    ("labelled", {"labelled": torch.ones(1) > 0}), ("labelled", {"labelled": torch.ones(2, dtype=torch.int64)}),
    ("label", {"label": torch.zeros(2, 1, dtype=torch.int64), "use_dr": False}),
    ("tau_g", {"tau_g": math.nan})])
def test_select_clean_refuses(word, changed):
    given = {"label": torch.tensor([0, 1]), "confidence": torch.ones(2), "beta": torch.ones(2) / 2}
    with pytest.raises(ValueError, match=word):
        select_clean(**given | changed)


def test_an_empty_class_selects_nothing_and_an_exact_quota_is_not_rounded_up():
    label = torch.tensor([0] * 10)
    clean = select_clean(label, torch.linspace(0, 1, 10), torch.tensor([0.3, 0.7]), rho=1.0, use_qr=False)
    assert clean.sum() == 3  # 10 * 1 * 0.3 is 3, not ceil(3.0000000000000004) = 4
    assert select_clean(label, torch.ones(10), torch.tensor([0.3, 0.7]), rho=1e30, use_qr=False).all()
    assert not select_clean(label, torch.ones(10), torch.tensor([0.3, 0.7]), rho=0, use_qr=False).any()
    assert not select_clean(label, torch.ones(10), torch.tensor([0.0, 1.0]), use_qr=False).any(), "a share may be 0"


def test_the_defaults_are_the_papers():
    rho, tau_g = (inspect.signature(select_clean).parameters[name].default for name in ("rho", "tau_g"))
    assert (rho, tau_g) == (0.7, 0.9)
    assert all(inspect.signature(f).parameters["tau"].default == 0.07 for f in (class_wise_loss, instance_wise_loss))
    assert inspect.signature(class_wise_loss).parameters["adaptive_weight"].default is True


@pytest.mark.parametrize("call,word", [
    (lambda z, y, q, c: class_wise_loss(z[:, 0], y, q, c), "z"), (lambda z, y, q, c: class_wise_loss(z, y[:3], q, c), "label"),
    (lambda z, y, q, c: class_wise_loss(z, y, q[:3], c), "confidence"),
    (lambda z, y, q, c: class_wise_loss(z, y, q, c[:3]), "clean"),
    (lambda z, y, q, c: class_wise_loss(z, y.float(), q, c), "label"),
    (lambda z, y, q, c: class_wise_loss(z, y, q, c, tau=math.nan), "tau"),
    (lambda z, y, q, c: class_wise_loss(z, y, q, c, tau=0), "tau"), (lambda z, y, q, c: instance_wise_loss(z[:, :1]), "view")])
def test_bad_arguments_are_named(call, word):
    with pytest.raises(ValueError, match=word):
        call(*batch())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("N", [10, 1000, 100_000])
def test_the_share_of_a_class_is_not_rounded_up(N, dtype):
    clean = select_clean(torch.zeros(N, dtype=torch.int64), torch.linspace(0, 1, N), torch.tensor([0.3, 0.7], dtype=dtype),
                         rho=1.0, use_qr=False)
    assert int(clean.sum()) == 3 * N // 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_share_of_a_class_is_not_rounded_down(dtype):
    def chosen(N, rho, *beta):
        label = torch.zeros(N, dtype=torch.int64)
        return int(select_clean(label, torch.linspace(0, 1, N), torch.tensor(beta, dtype=dtype), rho, use_qr=False).sum())

    assert chosen(1000, 1.0, 0.5, 0.5) == 500 and chosen(1000, math.inf, 0.5, 0.5) == 1000
    assert chosen(1000, math.inf, 1.0, 0.0) == 1000
    share = float(torch.tensor(0.5 + 2**-9, dtype=dtype))  # 0.5 in bfloat16
    assert chosen(100_000, 1.0, 0.5 + 2**-9, 0.5 - 2**-9) == math.ceil(100_000 * share)


def test_labelled_rows_are_clean_without_dr_and_confidence_is_above_tau_g():
    y, q, beta = torch.tensor([0, 0]), torch.tensor([0.5, 0.75]), torch.ones(1)
    assert select_clean(y, q, beta, use_dr=False, labelled=q < 0.6).tolist() == [True, False]
    assert not select_clean(y, q, beta, tau_g=0.75, use_dr=False).any()  # Eq. 8 has >


@pytest.mark.parametrize("name,value,word", [
    ("label", torch.zeros(2), "int64"), ("label", torch.zeros(2).byte(), "int64"), ("beta", torch.ones(1).long(), "beta"),
    ("confidence", torch.tensor([0.5, 1.5]), "0..1"), ("confidence", torch.ones(2).long(), "confidence"),
    ("confidence", torch.tensor([0.5, -0.5]), "0..1"), ("beta", torch.tensor([1.5, -0.5]), "beta"),
    ("beta", torch.tensor([0.7, 0.7]), "sum"), ("beta", torch.ones(2, 1) / 2, "beta"),
    ("label", np.zeros(2, dtype=np.int64), "label must be a torch"), ("confidence", np.ones(2), "confidence must be a torch"),
    ("beta", [1.0], "beta must be a torch"), ("labelled", np.ones(2, dtype=bool), "labelled must be a torch"),
    ("beta", torch.tensor([5.0, 3.0]), "sum"), ("beta", torch.tensor([math.inf, 0.0]), "sum")])
def test_what_is_no_label_share_or_probability_is_named(name, value, word):
    given = {"label": torch.zeros(2, dtype=torch.int64), "confidence": torch.ones(2), "beta": torch.ones(1)}
    with pytest.raises(ValueError, match=word):
        select_clean(**(given | {name: value}))


def test_clean_must_be_bool():
    with pytest.raises(ValueError, match="clean bool"):
        class_wise_loss(torch.ones(2, 2, 3), torch.zeros(2, dtype=torch.int64), torch.ones(2), torch.ones(2))


def test_a_probability_may_be_rounded_above_1_and_labels_may_be_int32():
    label, beta = torch.tensor([0, 1], dtype=torch.int32), torch.ones(2) / 2
    assert select_clean(label, torch.tensor([1 + 1e-6, 0.5]), beta, use_dr=False).tolist() == [True, False]


def test_a_filter_alone_needs_no_setting_of_the_other():
    label, beta = torch.tensor([0, 1]), torch.ones(2) / 2
    assert select_clean(label, torch.tensor([1.0, 0.5]), beta, rho=0.5, tau_g=math.nan, use_qr=False).all()
    assert select_clean(label, torch.ones(2), beta, rho=math.nan, use_dr=False).all()


def test_rows_that_tie_are_taken_in_their_order():
    """Many rows: an unstable sort leaves few in their order."""
    row = torch.arange(1000)
    label, level = row % 2, row // 2 % 5  # 500 rows a class, 100 of each confidence; the quota of a class is 150
    clean = select_clean(label, level / 5, torch.ones(2) / 2, rho=0.3, use_qr=False)
    assert torch.equal(clean, (level == 4) | (level == 3) & (row < 500))


def test_a_float64_share_is_not_rounded_up_and_no_rows_have_no_clean_ones():
    label, beta = torch.zeros(100, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    assert select_clean(label, torch.linspace(0, 1, 100), beta, 0.07, use_qr=False).sum() == 7  # 7.000000000000001
    assert select_clean(label[:0], torch.zeros(0), beta).shape == (0,)
