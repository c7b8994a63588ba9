"""Benchmarks of rot.py: steps, residuals, seconds and memory. Not a test.

Reads   data/<run>/ and out/<run>/  of finished runs (bash run_all.sh clinc 10, and so on), for their real log P
Writes  the screen, and as its last line JSON; with --keep results/bench_rot.json and tests/bench_rot.png

    python tests/bench_rot.py                            everything, about a quarter of an hour on 2 cores
    python tests/bench_rot.py --parts steps --corpora clinc
"""
import json
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import normalize

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from encoder import Encoder, pick_dtype  # noqa: E402
from make_lt_data import UserError, read_run, run_script, write_atomic  # noqa: E402
from pretrain import load_checkpoint, load_trained_layers  # noqa: E402
from rot import relaxed_ot  # noqa: E402
from seeding import seed_centres  # noqa: E402


@dataclass
class Args:
    parts: str = "steps,sinkhorn,pot,kmeans,scaling"  # which of them to run
    corpora: str = "clinc,banking,stackoverflow"  # whose log P
    seed: int = 1  # of the runs at gamma 10
    data_dir: str = "data"  # where make_lt_data.py wrote
    out_dir: str = "out"  # where train_imbanid.py wrote
    keep: bool = False  # write results/bench_rot.json and the picture; of all corpora alone
    child: str = ""  # N,K: one measurement of `scaling` in a process of its own


def real_scores(dataset, args):
    """{"start", "end"}: log P (N, K) float32 as stage 3 of a finished run first and last saw it; "z" (N, H); K."""
    run = f"{dataset}_g10_s{args.seed}"
    pre, last = (load_checkpoint(Path(args.out_dir) / run / name) for name in ("pretrain.pt", "last.pt"))
    if last is None:
        raise UserError(f"{args.out_dir}/{run}/last.pt is missing: SEED={args.seed} bash run_all.sh {dataset} 10")
    texts, labels, _, meta = read_run(Path(args.data_dir) / run)
    device = torch.device("cpu")
    encoder = Encoder(pre["config"]["encoder"], pre["config"]["max_length"], device, pick_dtype("auto", device),
                      trained_layers=pre["config"]["trained_layers"])
    hidden = encoder.trunk(encoder.tokenize(texts["train"]))
    config, found = last["config"], {}
    for when, state in (("start", pre), ("end", last)):
        load_trained_layers(encoder, state)
        z = normalize(encoder.all_features(hidden), dim=1)
        head = last["head"] if when == "end" else seed_centres(
            z, torch.from_numpy(labels["train"]), meta["num_classes"], meta["num_known"], config["kappa"],
            config["label_weight"] or 10, 100, 0.0, args.seed)
        found[when] = (z @ normalize(head, dim=1).T / config["temperature"]).log_softmax(1)
    return found | {"z": z, "K": meta["num_classes"]}


def seconds(call, repeats=5):
    """Median wall time of a call, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def side_by_side(ours, other):
    """Median wall times of two calls made in turn, since machines are noisy, and what other returned.

    Other is called at most 15 times, and for about 5 s in all.
    """
    ours()
    times = [[], []]
    while len(times[1]) < 15 and sum(times[1]) < 5:
        for call, spent in zip((ours, other), times):
            start = time.perf_counter()
            result = call()
            spent.append(time.perf_counter() - start)
    return *map(statistics.median, times), result


def bench_steps(scores):
    """Newton steps and residuals over the grid of weights, cold and warm, and at the corners."""
    grid = [(l1, l2) for l1 in (0.05, 0.1) for l2 in (0.2, 2.0, 7.0)]
    corners = [(0.01, 0.2), (0.01, 2.0), (0.01, 7.0), (0.05, 100.0), (0.1, 100.0), (0.01, 100.0)]
    found = {}
    for dataset, s in scores.items():
        rows = {"cold": [], "warm": [], "corner": []}
        for dtype, most in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
            for kind, weights in (("cold", grid), ("corner", corners)):
                for l1, l2 in weights:
                    for when in ("start", "end"):
                        r = relaxed_ot(s[when].to(dtype), l1, l2, return_plan=False)
                        assert r.residual <= most, (dataset, dtype, l1, l2, r)
                        rows[kind].append(r.n_iter)
                        if kind == "cold" and when == "start":
                            end = s["end"].to(dtype)
                            rows["warm"].append(relaxed_ot(end, l1, l2, init=r.potential, return_plan=False).n_iter)
        found[dataset] = {kind: [min(v), max(v)] for kind, v in rows.items()}
        log = [json.loads(line) for line in (s["out"] / "log.jsonl").read_text().splitlines()]
        found[dataset]["in training"] = [line["rot_iterations"] for line in log]
        print(f"{dataset:14} Newton steps, least and most: " + ", ".join(f"{k} {v}" for k, v in found[dataset].items()))
    return found


def bench_sinkhorn(scores):
    """Seconds of both solvers to residual 1e-6 on the same log P, side by side."""
    found = {}
    for dataset, s in scores.items():
        for l2 in (2.0, 7.0):
            newton, sinkhorn, r = side_by_side(
                lambda s=s, l2=l2: relaxed_ot(s["start"], 0.05, l2, tol=1e-6),
                lambda s=s, l2=l2: relaxed_ot(s["start"], 0.05, l2, tol=1e-6, solver="sinkhorn"))
            found[f"{dataset}, lambda2 {l2:g}"] = {"newton_s": newton, "sinkhorn_s": sinkhorn, "ratio": sinkhorn / newton,
                                                   "sweeps": r.n_iter, "sinkhorn_converged": r.converged}
            print(f"{dataset:14} lambda2 {l2:g}: Newton {1000 * newton:.0f} ms, Sinkhorn {sinkhorn:.2f} s ({r.n_iter} sweeps, "
                  f"residual {r.residual:.1e}), ratio {sinkhorn / newton:.0f}")
    return found


def pot_to_accuracy(solve, exact, tol):
    """The fewest iterations, in steps of a fifth, after which POT's column sums are within tol of the exact ones."""
    iterations = 4
    while float((solve(iterations).sum(0) - exact).abs().sum()) > tol:
        iterations = max(iterations + 1, int(iterations * 1.2))
    return iterations


def pot_solvers(log_p):
    """{(penalty, lambda2, name): plan after n iterations} for POT's solvers of the same problems, on torch tensors.

    ot.unbalanced's sinkhorn_stabilized is left out: it takes longer everywhere, and at lambda2 7 does not get there at all.
    """
    import ot
    a, b = (torch.full((n,), 1 / n, dtype=torch.float64) for n in log_p.shape)
    solvers = {("equality", 2.0, "ot.sinkhorn sinkhorn_log"): lambda n: ot.sinkhorn(
        a, b, -log_p, 0.05, method="sinkhorn_log", numItermax=n, stopThr=0, warn=False)}
    for lambda2 in (0.1, 1.0, 2.0, 7.0):
        solvers["kl", lambda2, "ot.unbalanced sinkhorn"] = lambda n, lambda2=lambda2: ot.unbalanced.sinkhorn_unbalanced(
            a, b, -log_p, 0.05, (float("inf"), lambda2), method="sinkhorn", numItermax=n, stopThr=0)
    return solvers


def bench_pot(scores):
    """Seconds of POT's Sinkhorn solvers and of ours until the class shares are within 1e-6 (L1) of the exact ones."""
    found = {}
    warnings.simplefilter("ignore")  # POT's own, on stopping before stopThr=0 and on overflow
    for dataset, s in scores.items():
        log_p = s["start"].double()
        for (penalty, lambda2, name), solve in pot_solvers(log_p).items():
            kwargs = {"lambda2": lambda2, "penalty": penalty}
            exact = relaxed_ot(log_p, tol=1e-12, **kwargs).beta
            error = float((relaxed_ot(log_p, tol=5e-7, **kwargs).beta - exact).abs().sum())
            assert error <= 1e-6, (name, error)
            key = f"{dataset}, {penalty}, lambda2 {lambda2:g}, {name}"
            iterations = pot_to_accuracy(solve, exact, 1e-6)
            newton, spent, _ = side_by_side(lambda: relaxed_ot(log_p, tol=5e-7, **kwargs), lambda: solve(iterations))  # noqa: B023
            found[key] = {"newton_s": newton, "pot_s": spent, "ratio": spent / newton, "pot_iterations": iterations}
            print(f"{key}: Newton {1000 * newton:.0f} ms, POT {1000 * spent:.0f} ms, ratio {spent / newton:.1f} "
                  f"({iterations} iterations)", flush=True)
    return found


def bench_kmeans(scores):
    """Sec. 4.8: the transport's seconds beside those of one k-means on the same rows' features."""
    from sklearn.cluster import KMeans
    found = {}
    for dataset, s in scores.items():
        transport = seconds(lambda s=s: relaxed_ot(s["end"]))
        kmeans = seconds(lambda s=s: KMeans(s["K"], n_init=1, random_state=0).fit(s["z"].numpy()), 3)
        found[dataset] = {"transport_s": transport, "kmeans_s": kmeans}
        print(f"{dataset:14} transport {1000 * transport:.0f} ms, k-means (one initialisation) {1000 * kmeans:.0f} ms")
    return found


def memory(field):
    """A line of /proc/self/status in MB."""
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) / 1024


def child(N, K):
    """Seconds, steps and peak memory above the input for made-up scores of a long-tailed problem."""
    torch.manual_seed(0)
    relaxed_ot(torch.zeros(8, 4), return_plan=False)  # what the first call loads is not the solver's memory
    log_p = torch.empty(N, K)
    share = 10 ** -torch.linspace(0, 1, K)
    for part in log_p.split(5000):
        part.normal_(0, 3)[torch.arange(len(part)), torch.multinomial(share, len(part), replacement=True)] += 12
        part -= part.logsumexp(1, keepdim=True)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of making the input
    before = memory("VmRSS")
    times = []
    while len(times) < 5 and sum(times) < 5:
        start = time.perf_counter()
        r = relaxed_ot(log_p, return_plan=False)
        times.append(time.perf_counter() - start)
    above = memory("VmHWM") - before
    print(json.dumps({"N": N, "K": K, "seconds": statistics.median(times), "steps": r.n_iter, "residual": r.residual,
                      "above_input_mb": above}))


def bench_scaling():
    found = []
    sizes = [(10 ** (e / 2), 150) for e in range(6, 13)] + [(10_000, K) for K in (20, 50, 100, 200, 500, 1000, 2000)]
    for N, K in sizes:
        done = subprocess.run([sys.executable, __file__, "--child", f"{round(N)},{K}"], stdout=subprocess.PIPE, text=True,
                              check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print("N {N:8} K {K:5}: {seconds:8.3f} s, {steps:2} steps, residual {residual:.1e}, {above_input_mb:6.1f} MB above the "
              "input".format(**found[-1]), flush=True)
    return found


def draw(scaling, threads, path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    fig, axes = plt.subplots(2, 2, figsize=(9, 5.4), sharex="col", layout="constrained")
    for column, letter, fixed in ((0, "N", "K = 150"), (1, "K", "N = 10,000")):
        rows = [r for r in scaling if (r["K"] == 150 if letter == "N" else r["N"] == 10_000 and r["K"] != 150)]
        for axis, key, color in ((axes[0, column], "seconds", "#0072B2"), (axes[1, column], "above_input_mb", "#D55E00")):
            axis.loglog([r[letter] for r in rows], [max(r[key], 1e-3) for r in rows], "o-", color=color)
            axis.grid(True, alpha=0.3)
        axes[1, column].set_xlabel(f"{'rows N' if letter == 'N' else 'classes K'}   ({fixed})")
    axes[0, 0].set_ylabel("seconds")
    axes[1, 0].set_ylabel("MB above the input, at its peak")
    fig.suptitle(f"relaxed_ot: Newton, cold start, float32 scores, no plan kept, threads: {threads}")
    fig.savefig(path, dpi=120)


def main(args):
    if args.child:
        child(*map(int, args.child.split(",")))
        return
    benches = {"steps": bench_steps, "sinkhorn": bench_sinkhorn, "pot": bench_pot, "kmeans": bench_kmeans,
               "scaling": lambda scores: bench_scaling()}
    parts, scores, found = args.parts.split(","), {}, {"threads": torch.get_num_threads(), "torch": torch.__version__}
    if unknown := set(parts) - set(benches):
        raise UserError(f"--parts: {min(unknown)!r} is none of {', '.join(benches)}")
    if args.keep and args.corpora != Args.corpora:
        raise UserError("--keep is for the tables of all corpora: leave --corpora out")
    if set(parts) - {"scaling"}:
        for dataset in args.corpora.split(","):
            scores[dataset] = real_scores(dataset, args) | {"out": Path(args.out_dir) / f"{dataset}_g10_s{args.seed}"}
    for part in parts:
        print(f"\n{part}")
        found[part] = benches[part](scores)
        if args.keep:  # after every part: the next one may be stopped
            kept = REPO / "results/bench_rot.json"  # parts measured before stay
            found = (json.loads(kept.read_text()) if kept.exists() else {}) | found
            write_atomic(kept, json.dumps(found, indent=1) + "\n")
            if part == "scaling":
                draw(found["scaling"], found["threads"], REPO / "tests/bench_rot.png")
    print(json.dumps(found))


if __name__ == "__main__":
    run_script(main, Args)
