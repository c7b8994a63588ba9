"""The losses of ImbaNID (ACL 2024, Sec. 3.5) and its choice of clean pseudo-labels. One file, torch only: copy it.

    import torch
    from losses import class_wise_loss, contrastive_objective, instance_wise_loss, select_clean

    torch.manual_seed(0)
    z = torch.nn.functional.normalize(torch.randn(8, 2, 16), dim=-1).requires_grad_()   # B rows, V views, H numbers
    label, confidence = torch.arange(8) % 3, torch.rand(8)
    clean = select_clean(label, confidence, torch.full((3,), 1 / 3), rho=0.7, tau_g=0.9)
    cwcl, num_positive = class_wise_loss(z, label, confidence, clean, tau=0.07)         # (B, V) each
    iwcl = instance_wise_loss(z, tau=0.07)                                              # (B, V)
    contrastive_objective(cwcl, iwcl, num_positive).mean().backward()

Call them on float32, outside of autocast: half precision, divided by tau, puts the gradient off by a percent.

Every loss is per anchor, so the caller divides by the number of anchors it has, on one process or many. In a
distributed run, pass `gather`: it takes a (B, ...) tensor and returns the rows of all processes, this process's own rows
first, and lets gradients through. Anchors are then the local rows and the contrast set is the global batch.
"""
import torch


def select_clean(label, confidence, beta, rho=0.7, tau_g=0.9, use_dr=True, use_qr=True, labelled=None):
    """Which pseudo-labels to trust: the union of DR (Eq. 7) and QR (Eq. 8), bool (N,).

    label: int64 (N,) pseudo-labels. confidence: (N,) the classifier's probability of that label, so -log of it is the
    small loss that DR sorts by. beta: (K,) class distribution, r_j of the paper. labelled: bool (N,) rows whose label is
    true, always clean. DR keeps, in class j, the min(|s_j|, ceil(N rho beta_j)) rows of largest confidence (labelled ones
    before all, ties: first row); QR keeps the rows with confidence > tau_g. Without both, every row is clean (the paper's
    "w/o DR and QR").
    Raises ValueError for other shapes and types, labels outside of 0..K-1, NaN, and what is no probability.
    """
    for name, value in (("label", label), ("confidence", confidence), ("beta", beta), ("labelled", labelled)):
        if not torch.is_tensor(value) and not (name == "labelled" and value is None):
            raise ValueError(f"{name} must be a torch tensor, got {type(value).__name__}")
    if label.ndim != 1 or label.dtype not in (torch.int32, torch.int64):  # others index as masks, or not at all
        raise ValueError(f"label must be int32 or int64 of shape (N,), got {label.dtype} {tuple(label.shape)}")
    N = len(label)
    for name, value in (("confidence", confidence), ("beta", beta)):
        if not value.is_floating_point():
            raise ValueError(f"{name} must be a floating-point tensor, got {value.dtype}")
    if confidence.shape != (N,) or not ((confidence >= 0) & (confidence <= 1 + 1e-3)).all():
        raise ValueError(f"confidence must have shape ({N},) and lie in 0..1, without NaN")
    if beta.ndim != 1 or not (beta >= 0).all() or N and not 0 <= label.min() <= label.max() < len(beta):
        raise ValueError(f"beta must have shape (K,) with every label in 0..K-1, and hold no NaN, got {tuple(beta.shape)}")
    if not (total := beta.float().sum()) <= 1.01:
        raise ValueError(f"beta must hold class shares, which sum to 1, got a sum of {float(total):.3g}")
    if labelled is not None and (labelled.shape != (N,) or labelled.dtype != torch.bool):
        raise ValueError(f"labelled must be bool of shape ({N},), got {labelled.dtype} {tuple(labelled.shape)}")
    if use_dr and not rho >= 0 or use_qr and tau_g != tau_g:
        raise ValueError(f"rho must be 0 or more and tau_g a number, got {rho} and {tau_g}")
    if not use_dr and not use_qr:
        return torch.ones(N, dtype=torch.bool, device=label.device)
    clean = torch.zeros(N, dtype=torch.bool, device=label.device)
    if use_dr:
        exact = (N * min(rho, 1e100) * beta.double()).clamp_max(N + 1)  # rho may be inf, and 0 * inf is NaN
        rounding = 1e-6 + (0 if beta.dtype == torch.float64 else 5e-7 * exact)  # float32 0.3 * 10 is 3, not 3.0000001
        quota = torch.ceil(exact - rounding)
        quota = quota.clamp_max(N).long().to(label.device)  # above 2**63 it would wrap; not every device has float64
        first = confidence if labelled is None else confidence.masked_fill(labelled, float("inf"))  # others may tie at 1
        order = torch.argsort(first, descending=True, stable=True)
        order = order[torch.argsort(label[order], stable=True)]  # class by class, most confident first
        size = torch.bincount(label, minlength=len(beta))
        rank = torch.arange(N, device=label.device) - (size.cumsum(0) - size)[label[order]]
        clean[order] = rank < quota[label[order]]
    if use_qr:
        clean |= confidence > tau_g
    if labelled is not None:
        clean |= labelled
    return clean


def contrast_log_prob(z, tau, gather=None):
    """Anchors (B, V, H) against all other views of the global batch (C, V, H).

    Returns log softmax of z_i . z_j / tau over j != i, (B*V, C*V), anchor i at row i and itself left out (-inf there).
    """
    if z.ndim != 3:
        raise ValueError(f"z must have shape (B, V, H), got {tuple(z.shape)}")
    if not tau > 0:
        raise ValueError(f"tau must be positive, got {tau}")
    everyone = z if gather is None else gather(z)
    similarity = z.flatten(0, 1) @ everyone.flatten(0, 1).T / tau
    return similarity.fill_diagonal_(float("-inf")).log_softmax(1)  # own rows come first, so anchor i is column i


def class_wise_loss(z, label, confidence, clean, tau=0.07, adaptive_weight=True, gather=None):
    """CWCL, Eq. 10, with the minus sign that the printed formula lacks.

    z: (B, V, H), unit length. label: int64 (B,). confidence: (B,), q of the weights w_ip = q_i q_p (1 without
    adaptive_weight), which pass no gradient on. clean: bool (B,). P(i) is every view of every *other* clean row with i's
    label; an anchor that is noisy or labelled -1 has none. Returns the loss sum over P(i) of -w_ip log(...) and |P(i)|,
    (B, V) each; both are 0 where P(i) is empty.
    """
    B, V = z.shape[:2]
    for name, value in (("label", label), ("confidence", confidence), ("clean", clean)):
        if value.shape != (B,):
            raise ValueError(f"{name} must have shape ({B},), got {tuple(value.shape)}")
    if label.is_floating_point() or clean.dtype != torch.bool:
        raise ValueError(f"label must be integers and clean bool, got {label.dtype} and {clean.dtype}")
    log_prob = contrast_log_prob(z, tau, gather)
    clean, confidence = clean & (label >= 0), confidence.detach()
    other_label, other_q, other_clean = (x if gather is None else gather(x) for x in (label, confidence, clean))
    positive = (label[:, None] == other_label) & clean[:, None] & other_clean
    row = torch.arange(B, device=z.device)
    positive[row, row] = False
    weight = positive.to(z.dtype)
    if adaptive_weight:
        weight = torch.where(positive, (confidence[:, None] * other_q).to(z.dtype), weight)  # q of a noisy row may be NaN
    positive = positive.repeat_interleave(V, 0).repeat_interleave(V, 1)
    weight = weight.repeat_interleave(V, 0).repeat_interleave(V, 1)
    # The diagonal is -inf and never a positive: without the mask, 0 * -inf would be NaN for anchors without positives.
    loss = -(weight * log_prob.masked_fill(~positive, 0)).sum(1)
    return loss.view(B, V), positive.sum(1).view(B, V)


def instance_wise_loss(z, tau=0.07, gather=None):
    """IWCL, Eq. 11, as in SimCLR: an anchor's positives are the other views of its own row. z: (B, V, H) -> (B, V)."""
    B, V = z.shape[:2]
    if V < 2:
        raise ValueError(f"z must hold at least two views, got {V}")
    log_prob = contrast_log_prob(z, tau, gather)[:, :B * V].reshape(B, V, B, V)
    row = torch.arange(B, device=z.device)
    own = log_prob[row, :, row]  # (B, V, V): each anchor against the views of its own row
    own = own.masked_fill(torch.eye(V, dtype=torch.bool, device=z.device), 0)
    return -own.sum(2) / (V - 1)


def contrastive_objective(cwcl, iwcl, num_positive):
    """The bracket of Eq. 12 per anchor, (L_c(i) + L_i(i)) / (1 + |P(i)|). All arguments (B, V)."""
    return (cwcl + iwcl) / (1 + num_positive)
