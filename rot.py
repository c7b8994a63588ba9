"""Relaxed optimal transport for pseudo-labels with an unknown class distribution. One file, torch only: copy it.

    import torch
    from rot import relaxed_ot

    torch.manual_seed(0)
    logits = torch.randn(1000, 10) + torch.tensor([3.0] + [0.0] * 9)    # a classifier that prefers class 0
    result = relaxed_ot(logits.log_softmax(1), lambda1=0.05, lambda2=2.0)
    pseudo_label = result.plan.argmax(1)                                # (1000,)
    print(result.beta)                                                  # class shares, flatter than the classifier's
    assert result.converged and result.residual < 1e-6

The problem (ImbaNID, ACL 2024, Eq. 5 and its Appendix A), over plans Q >= 0 (N, K) and class shares beta (K,):

    min  -<Q, log P> + lambda1 sum Q (log Q - 1) + lambda2 D(beta)    s.t.  Q 1 = alpha,  Q^T 1 = beta,  sum beta = 1

with D the penalty: reverse_kl KL(prior || beta), the paper's ROT; kl KL(beta || prior), its EOT; equality beta = prior,
its COT (optimal transport with both marginals fixed). The entropic term carries the sign under which the paper's
printed derivatives hold.

Solver "newton" works on the semi-dual. The row constraint removes f: Q_ij = alpha_i softmax_j((log P_ij + g_j) / lambda1),
which leaves a concave function of the K numbers g with gradient beta(g) - Q^T 1 and a K x K Hessian, both sums over
rows: a few passes over log P a step, in chunks, over any number of processes. Solver "sinkhorn" is the paper's Algorithm 1,
its column scalings damped.
"""
import math
import warnings
from typing import NamedTuple

import torch

TOO_FAR = "log_p lies too far apart for float64: pass -inf for what is forbidden"


class RotResult(NamedTuple):
    plan: torch.Tensor | None  # (N, K) Q, rows sum to alpha (Q / alpha: the pseudo-labels); None with return_plan=False
    beta: torch.Tensor  # (K,) float64, the class distribution; sums to 1
    potential: torch.Tensor  # (K,) float64, the dual variable g: pass it as init to start warm
    n_iter: int  # Newton steps, or Sinkhorn sweeps
    residual: float  # |Q^T 1 - beta|_1, the mass that still sits in the wrong column
    converged: bool  # residual <= tol


@torch.no_grad()
def relaxed_ot(log_p, lambda1=0.05, lambda2=2.0, *, row=None, prior=None, penalty="reverse_kl", solver="newton",
               tol=None, max_iter=None, sweeps=1, init=None, chunk_rows=None, reduce=None, return_plan=True):
    """Solve the relaxed transport problem of the module docstring (the paper's Eq. 5).

    log_p: (N, K) log-probabilities or any scores, -inf allowed; float16 to float64, never written to; no gradient.
    lambda1: weight of the entropic term, > 0, in units of log_p. lambda2: weight of the penalty, > 0; unused by equality.
    row: (N,) positive sample weights, alpha up to scale (default: equal). prior: (K,) positive, up to scale (uniform).
    penalty: "reverse_kl", "kl" or "equality". solver: "newton", or "sinkhorn" with `sweeps` row and column scalings
    before every update of beta and h (three or more need not converge, least with a small lambda2: see `converged`).
    tol: on the residual |Q^T 1 - beta|_1 (default 1e-9 for float64 rows, 1e-6 below). max_iter: Newton steps (500) or
    Sinkhorn sweeps (10,000). init: (K,) potential of an earlier solution. chunk_rows: rows a pass handles at once.
    reduce: sums a tensor over processes that each hold some of the rows (none is allowed), and all else alike; all get the
    same beta, also where their processors round apart.

    Returns RotResult. Raises ValueError, naming the argument, for one out of range, or if a row or a column of log_p has no
    finite score (under kl such a column stays empty). Warns if it did not converge: where fixed shares cannot be met; now and
    then from an init far off, or under reverse_kl if lambda1 is 1e5 times smaller than the scores, or if the prior spans six
    decades (with solver "sinkhorn" five) and lambda2 is not far above lambda1. Mostly a larger max_iter helps then, or as init
    the potential that the other solver finds, or that of a larger lambda2.
    """
    lambda2 = 1.0 if penalty == "equality" else lambda2  # equality does not use it: any value may be passed
    log_p, alpha, prior, g = _check(log_p, lambda1, lambda2, row, prior, penalty, solver, init)
    reduce = reduce or (lambda x: x)
    limits = {"tol": (tol, 0), "max_iter": (max_iter, 0), "sweeps": (sweeps, 1), "chunk_rows": (chunk_rows, 1)}
    for name, (value, least) in limits.items():
        if value is not None and not value >= least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    chunk_rows = chunk_rows or max(2**18 // log_p.shape[1], log_p.shape[1])  # 2 MB of float64, or that of a Hessian
    alpha, prior, start, spread, coarse, world = _survey(log_p, alpha, prior, penalty, lambda1, chunk_rows, reduce)
    tol = tol if tol is not None else 1e-6 if coarse else 1e-9
    if penalty == "kl":  # a far column rests where -g / lambda2 = (g - gap) / lambda1, one with a share within a few lambda2
        start, spread = start * lambda2 / (lambda1 + lambda2), min(spread, 5 * lambda2)
    spread = min(spread, 1e6 * lambda1)  # beyond, a score is as good as -inf, and from a higher rung digits would be lost
    rungs = math.ceil(math.log(ratio, 4)) if init is None and (ratio := spread / 50 / lambda1) > 1 else 0
    g = start if init is None else g
    problem = _SemiDual(log_p, alpha, prior, lambda1, lambda2, penalty, chunk_rows, reduce, world)
    if solver == "newton":
        g, n_iter, residual = _newton(problem, g, tol, 500 if max_iter is None else max_iter, rungs)
    else:
        g, n_iter, residual = _sinkhorn(problem, g, tol, 10_000 if max_iter is None else max_iter, sweeps)
    if not residual <= tol:
        warnings.warn(f"relaxed_ot: the {solver} solver stopped at residual {residual:.1e} after {n_iter} iterations "
                      f"(tol {tol:.1e})", RuntimeWarning, stacklevel=3)  # no_grad is a frame of its own
    beta, = problem.alike(problem.beta(g)[0])
    return RotResult(problem.plan(g) if return_plan else None, beta, g, n_iter, residual, residual <= tol)


def moving_average_marginal(beta, log_p, mu=0.9, reduce=None):
    """MOT's class distribution (Sec. 4.3): mu * beta + (1 - mu) * v, v_j the share of rows whose largest log_p is j.

    beta: (K,) the last one, float64, positive. log_p: (N, K), this process's rows. mu: above 0, at most 1. Returns (K,)
    float64, positive, the prior for relaxed_ot(..., penalty="equality"). Raises ValueError for a mu or a shape that cannot
    be, NaN, and no rows.
    """
    if not 0 < mu <= 1:
        raise ValueError(f"mu must be above 0 and at most 1, got {mu}")
    if log_p.ndim != 2 or beta.shape != log_p.shape[1:]:
        raise ValueError(f"beta must have shape (K,) and log_p (N, K), got {tuple(beta.shape)} and {tuple(log_p.shape)}")
    if not (beta > 0).all():
        raise ValueError("beta must be positive")
    v = torch.bincount(log_p.argmax(1), minlength=log_p.shape[1]).double()
    v[0] += math.nan if torch.isnan(log_p).any() else 0.0  # so that every process hears of it
    v = v if reduce is None else reduce(v)
    if not v.sum() > 0:
        raise ValueError("log_p holds NaN, or no rows at all")
    return (mu * beta + (1 - mu) * v / v.sum()).clamp_min(1e-300)  # a class that no row is of for long comes down to 0


def _check(log_p, lambda1, lambda2, row, prior, penalty, solver, init):
    """The arguments as float tensors on log_p's device, or a ValueError that names the one that is wrong."""
    if not torch.is_tensor(log_p) or log_p.ndim != 2 or not log_p.is_floating_point() or log_p.shape[1] == 0:
        raise ValueError("log_p must be a floating-point tensor of shape (N, K)")
    N, K = log_p.shape
    device = log_p.device
    for name, value in (("lambda1", lambda1), ("lambda2", lambda2)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if penalty not in ("reverse_kl", "kl", "equality"):
        raise ValueError(f"penalty must be 'reverse_kl', 'kl' or 'equality', got {penalty!r}")
    if solver not in ("newton", "sinkhorn"):
        raise ValueError(f"solver must be 'newton' or 'sinkhorn', got {solver!r}")

    def vector(name, value, size, default):
        if value is None:
            return torch.full((size,), default, dtype=torch.float64, device=device)
        value = value.copy() if hasattr(value, "copy") else value  # torch takes no numpy array that is reversed
        value = torch.as_tensor(value, dtype=torch.float64, device=device)
        if value.shape != (size,):
            raise ValueError(f"{name} must have shape ({size},), got {tuple(value.shape)}")
        return value

    alpha, prior, g = vector("row", row, N, 1.0), vector("prior", prior, K, 1.0), vector("init", init, K, 0.0)
    if not (prior.isfinite() & (prior > 0)).all():
        raise ValueError("prior must be finite and positive")
    prior = prior / prior.max() if prior.sum().isinf() else prior
    if g.abs().max() > 1e4 * lambda1:  # a constant in it says nothing and takes up its digits
        g = g - g.max()
    if not g.isfinite().all():
        raise ValueError("init must be finite")
    return log_p, alpha, prior, g.detach().clone()


def _survey(log_p, alpha, prior, penalty, lambda1, chunk_rows, reduce):
    """One pass over all scores: refuses what has no solution.

    Returns alpha and prior, summing to 1, a start, the spread, whether a row is below float64, and the number of processes.

    The start of g is 0, but a column that no row comes near (50 lambda1 or more behind in all) is lifted to its mean gap.
    The spread is the mean gap between a row's best score and its others: the scale against which lambda1 is small or not.
    """
    K = log_p.shape[1]
    sums = torch.zeros(4, K, dtype=torch.float64, device=log_p.device)
    faults = torch.zeros(6, dtype=torch.float64, device=log_p.device)  # the last two are none
    faults[3] = (~(alpha.isfinite() & (alpha > 0))).sum()
    faults[4], faults[5] = len(log_p) * (log_p.dtype != torch.float64), 1
    for i in range(0, len(log_p), chunk_rows):
        part = log_p[i:i + chunk_rows]
        top = part.amax(1, keepdim=True).double()
        faults[:3] += torch.stack([(top.isnan() | top.isposinf()).sum(), top.isneginf().sum(), (top / lambda1).isinf().sum()])
        gap = top - part
        near, total, missing = gap.amin(0) < 50 * lambda1, gap.sum(0), torch.zeros(K, device=gap.device)
        if not total.isfinite().all():
            missing = (gap == math.inf).sum(0)
            total = gap.masked_fill_(gap == math.inf, 0.0).sum(0)
        sums[:3] += torch.stack([total, len(part) - missing, near])
    sums[3, 0] = alpha.sum()
    faults, sums = reduce(torch.cat([faults, sums.flatten()])).split([6, 4 * K])
    total_gap, usable, near, (weight, *_) = sums.view(4, K)
    if faults[0]:
        raise ValueError("log_p must not hold NaN or +inf")
    if faults[1]:
        raise ValueError("log_p must have a finite entry in every row")
    if faults[2]:
        raise ValueError(TOO_FAR)
    if faults[3]:
        raise ValueError("row must be finite and positive")
    if not weight.isfinite():
        raise ValueError("row must have a finite sum")
    if weight == 0:
        raise ValueError("log_p must have at least one row")
    empty = usable == 0
    if empty.any():
        if penalty != "kl":
            raise ValueError(f"log_p must have a finite entry in every column: {penalty} gives column "
                             f"{int(empty.int().argmax())} a positive share")
        prior = prior.masked_fill(empty, 0)  # KL(beta || prior) is finite at beta_j = 0: the column stays empty
    start = torch.where((near == 0) & ~empty, total_gap / usable.clamp_min(1), 0.0)
    if not start.isfinite().all():
        raise ValueError(TOO_FAR)
    # fsum rounds alike on all processes; divided first, the sum stays finite.
    spread = math.fsum((total_gap / math.fsum(usable.tolist())).tolist())
    return alpha / weight, prior / prior.sum(), start, spread, bool(faults[4]), int(faults[5])


class _SemiDual:
    """The concave dual in g: value, gradient and Hessian, summed over row chunks and over processes in float64.

    float64 whatever log_p's type: a line search on float32 values stagnates, and (log P + g) / lambda1 loses the digits
    that a residual of 1e-6 needs. Only one chunk at a time is converted, unless all rows fit in KEEP bytes: then their
    exponentials at one g are kept, and a g nearby rescales their columns.
    """

    KEEP = 2**26

    def __init__(self, log_p, alpha, prior, lambda1, lambda2, penalty, chunk_rows, reduce, world):
        self.log_p, self.alpha, self.prior, self.penalty = log_p, alpha, prior, penalty
        self.lambda1, self.lambda2, self.chunk_rows, self.reduce, self.world = lambda1, lambda2, chunk_rows, reduce, world
        self.kept, self.buffer = None, None  # (lambda1, g, its chunks), and where they lie

    def alike(self, *parts):
        """These float64 tensors, equal to the last bit on all processes: the means of theirs.

        Every process decides for itself how to go on, and their processors may round apart: one that took another step than
        the others would wait for them in an exchange that they never come to.
        """
        if self.world == 1:
            return parts
        flat = self.reduce(torch.cat([part.flatten() for part in parts])) / self.world
        return [x.view_as(part) for x, part in zip(flat.split([part.numel() for part in parts]), parts)]

    def chunks(self, g, keep=False):
        """For each chunk of rows: alpha (n,), E (n, K), top (n,), with E = exp((log P + g) / lambda1 - top) at most 1.

        Q is alpha E / (E summed over columns). torch.softmax takes twice as long for the same in float64.
        """
        if keep and self.buffer is None:
            self.buffer = torch.empty(self.log_p.shape, dtype=torch.float64, device=g.device)
        for i in range(0, len(self.log_p), self.chunk_rows):
            rows = slice(i, i + self.chunk_rows)
            E = torch.add(g / self.lambda1, self.log_p[rows], alpha=1 / self.lambda1, out=self.buffer[rows] if keep else None)
            top = E.amax(1)
            yield self.alpha[rows], E.sub_(top[:, None]).exp_(), top

    def near(self, g):
        """(w, chunks): Q at g is alpha E w / (E w summed over columns), with w (K,) within exp(+-20), or ones."""
        if 8 * self.log_p.numel() > self.KEEP:
            return torch.ones_like(g), self.chunks(g)
        if self.kept is None or self.kept[0] != self.lambda1 or (g - self.kept[1]).abs().max() > 20 * self.lambda1:
            self.kept = self.lambda1, g, list(self.chunks(g, keep=True))
        return ((g - self.kept[1]) / self.lambda1).exp(), self.kept[2]

    def beta(self, g):
        """beta (K,) that minimises lambda2 D(beta) + <g, beta> over the simplex, and that minimum."""
        if self.penalty == "equality":
            return self.prior, g @ self.prior
        if self.penalty == "kl":
            score = self.prior.log() - g / self.lambda2
            return score.softmax(0), -self.lambda2 * score.logsumexp(0)
        # Appendix A: beta_j = lambda2 prior_j / (g_j - h), h the root of sum beta = 1. The sum's inverse is a harmonic mean,
        # concave in h and nearly straight, so Newton's steps for it come from the right end to the root and never pass it.
        c = self.lambda2 * self.prior
        gap = g - g.min()  # g_j - h = gap_j + t, so that t > 0 keeps its digits
        t = float(c[gap.argmin()])
        for _ in range(200):
            b = c / (gap + t)
            total = float(b.sum())
            step = total * (total - 1) / float((b / (gap + t)).sum())
            t += step
            if step <= 1e-10 * t:  # the next one is of the order of its square
                break
        b = c / (gap + t)
        b = b / b.sum()
        return b, self.lambda2 * (self.prior * (self.prior / b).log()).sum() + g @ b

    def value_and_sums(self, g):
        """Of the dual at g the value (), the column sums q = Q^T 1 (K,), beta (K,), and the residual () |beta - q|_1.

        Its gradient is beta - q. All are alike.
        """
        w, chunks = self.near(g)
        sums = torch.zeros(2, len(g), dtype=torch.float64, device=g.device)
        for alpha, E, top in chunks:
            total = E @ w
            sums[0] += E.T @ (alpha / total)
            sums[1, 0] += alpha @ (top + total.log())
        sums[0] *= w  # before the exchange: whether rows are kept, and so w, is each process's own affair
        q, (value, *_) = self.reduce(sums)
        beta, minimum = self.beta(g)
        value, beta, residual = self.alike(minimum - self.lambda1 * value, beta, (beta - q).abs().sum())
        return value, q, beta, residual

    def curvature(self, g, beta):
        """The negative Hessian (K, K) of the dual at g."""
        w, chunks = self.near(g)
        shared = torch.zeros(len(g), len(g), dtype=torch.float64, device=g.device)  # Q^T S, S = Q / alpha
        product = torch.empty_like(shared, dtype=torch.float32)
        for alpha, E, _ in chunks:
            # Denormal numbers, below 1e-38, take processors tenfold: none may enter the scaling, nor leave the products.
            scaled = torch.threshold_(E.float(), 1e-34, 0.0)
            scaled.mul_(w.float()).mul_((alpha.sqrt() / (E @ w)).float()[:, None])
            torch.threshold_(scaled, 1e-18, 0.0)
            shared += torch.mm(scaled.T, scaled, out=product)  # autocast would make half precision of it without out
        # diag(q) - Q^T S is the Laplacian of the weights off the diagonal of Q^T S, since the rows of S sum to 1. Written
        # so, nothing cancels where rows are nearly one-hot, and float32 products give each entry to seven digits. They are
        # not symmetric to the last digit: without this mean the matrix is not positive along columns that no row comes near.
        found = self.reduce((shared + shared.T) / 2).fill_diagonal_(0).neg_()
        found.diagonal().sub_(found.sum(1))
        found /= self.lambda1
        if self.penalty == "kl":
            found += (torch.diag(beta) - torch.outer(beta, beta)) / self.lambda2
        elif self.penalty == "reverse_kl":
            b2 = beta * beta / self.prior
            found += (torch.diag(b2) - torch.outer(b2, b2) / b2.sum()) / self.lambda2
        return found

    def plan(self, g):
        """Q (N, K). The last that is asked of a problem: float64 plans take the place of what is kept."""
        w, chunks = self.near(g)
        dtype = torch.promote_types(self.log_p.dtype, torch.float32)
        plan = self.buffer if self.kept and dtype == torch.float64 else torch.empty_like(self.log_p, dtype=dtype)
        for (alpha, E, _), Q in zip(chunks, plan.split(self.chunk_rows)):
            scale = (alpha / (E @ w))[:, None]
            torch.mul(E, w, out=Q).mul_(scale)
        return plan


def _newton(problem, g, tol, max_iter, rungs):
    """Damped Newton ascent on the dual. Returns (g, steps, residual).

    A small lambda1 makes the dual nearly piecewise linear, and from afar a Newton step then says little. So the problem is
    solved at 4^rungs lambda1 first, loosely, and then at a quarter of it, four times as closely, and so on, each time from
    where a straight line through the last two solutions leads (through loose ones it leads astray). Far away, six sweeps
    come before all: they fill columns that start almost empty.
    """
    target, before, n_iter = problem.lambda1, None, 0
    for rung in range(rungs, -1, -1):
        problem.lambda1 = target * 4.0 ** rung
        g, before = (g if before is None else g + (g - before) / 4), (None if rung == rungs else g)
        state = problem.value_and_sums(g)
        for _ in range(6 if rung == rungs else 0):
            _, q, beta, residual = state
            if residual < 0.1:
                break
            g = _sweep(problem, g, q, beta)
            state = problem.value_and_sums(g)
        close = tol if rung == 0 else 0.03 / 4 ** (rungs - rung)
        most = max_iter - n_iter if rung == 0 else min(100, max_iter - n_iter)  # a rung is only a start
        g, steps, residual = _newton_at(problem, g, state, close, most)
        n_iter += steps
    problem.lambda1 = target
    return g, n_iter, residual


def _newton_at(problem, g, state, tol, max_iter):
    """At most max_iter Newton steps at one lambda1, from g and value_and_sums there. Returns (g, steps, residual).

    The Hessian is most of the work, so one whose step has brought the residual down sixteenfold serves again.
    """
    before = 0.0
    slack = 1e-12 * (float(state[0].abs()) + problem.lambda1) + 1e-14 * problem.lambda2  # the digits that the value has
    for n_iter in range(max_iter + 1):
        value, q, beta, residual = state
        grad, residual = beta - q, float(residual)
        if not residual > tol or n_iter == max_iter:  # NaN, where numbers have run out, stays
            return g, n_iter, residual
        if not residual < 0.06 * before:
            # The constant shift of g is the one flat direction; a rank-one term along it makes the system definite. The
            # small diagonal term is for columns that no row comes near, where the dual is flat to the last digit.
            system = problem.curvature(g, beta)
            largest = system.diagonal().max()
            system += largest / len(g)
            system.diagonal().add_(1e-13 * largest + 1e-12 * residual)
            factor, failed = torch.linalg.cholesky_ex(system)
        before = residual
        # Cholesky fails where the dual is flat to the last digit in more directions: then each column goes by itself.
        step = grad / system.diagonal() if failed else torch.cholesky_solve(grad[:, None], factor)[:, 0]
        # Rows saturate a few lambda1 away, where longer steps overshoot: no column goes further than four, or a tenth of the
        # longest step. Laplacians are all the Hessian is made of, and with them a clamped step ascends still. Columns next to
        # empty, whose steps are noise, are no measure: those of the others, far from them all, would be clamped to one number.
        live = step[~(q + beta < 1e-3 * residual / len(g))]  # all where numbers have run out and this is NaN
        step -= live.median()
        most = ((live - live.median()).abs().max().nan_to_num() / 10).clamp_min(4 * problem.lambda1)
        step.clamp_(-most, most)
        t, (step, slope, most) = 1.0, problem.alike(step, grad @ step, most)
        while True:
            trial = g + t * step
            state = reached, _, _, left = problem.value_and_sums(trial)
            # The value decides, but close to the optimum, where its digits run out, the residual does.
            smaller = left <= (1 - 0.1 * t) * residual
            if slope > 0 and reached >= value + 1e-4 * t * slope or smaller and reached >= value - slack:
                break
            t /= 4
            # Where groups of columns hardly share a row the step may be 1e11 long, of which the first lambda1 is good.
            if t < 1e-9 and t * most < problem.lambda1:  # the direction is worth nothing; a sweep still ascends
                trial, before = _sweep(problem, g, q, beta), 0.0
                state = problem.value_and_sums(trial)
                break
        g = trial


def _sweep(problem, g, q, beta):
    """g after scaling the columns of its plan, with sums q, towards beta.

    A column that gains mass gets a larger g and by Eq. 23 a smaller beta, so an undamped update overshoots where lambda2 is
    small against lambda1. The damping is that of the linearised joint update of g_j and beta_j; it leaves the fixed point.
    """
    response = {"equality": 0.0, "kl": 1.0, "reverse_kl": beta / problem.prior}[problem.penalty] / problem.lambda2
    move = problem.lambda1 * (beta.clamp_min(1e-300).log() - q.clamp_min(1e-300).log())
    return problem.alike(g + move / (1 + problem.lambda1 * response))[0]


def _sinkhorn(problem, g, tol, max_iter, sweeps):
    """The paper's Algorithm 1: Sinkhorn with beta held for `sweeps` sweeps, then beta and h. Returns (g, sweeps, residual).

    In the log domain throughout. The plan at g has its rows scaled already (f), so that a sweep is a column scaling.
    """
    _, q, beta, residual = problem.value_and_sums(g)
    n_iter = 0
    while residual > tol and n_iter < max_iter:
        for _ in range(min(sweeps, max_iter - n_iter)):
            g = _sweep(problem, g, q, beta)
            _, q, updated, residual = problem.value_and_sums(g)
            n_iter += 1
        beta = updated
    return problem.alike(g - g.mean())[0], n_iter, float(residual)
