"""k-means, and semi-supervised k-means, on features nobody trained, or on pre-trained ones. See shared.py for the files.

    python -m baselines.kmeans --dataset clinc --gamma 10 --seed 0 --encoder minilm
    python -m baselines.kmeans --features pretrained --semi_supervised --tag ss_pretrained --encoder minilm

What any training has to beat. Semi-supervised: the labelled rows are held in their classes, whose means are the first centres,
and the search is as thorough as GCD's, which ends with it.
"""
from dataclasses import dataclass

from baselines.shared import Flags, Run, finish
from make_lt_data import UserError, check_positive, check_used, run_script
from seeding import kmeans, semi_supervised_kmeans


@dataclass
class Args(Flags):
    features: str = "raw"  # raw: of the encoder as it comes; pretrained: after pretrain.py
    semi_supervised: bool = False  # hold the labelled rows in their classes
    n_init: int = 100  # starts by k-means++ of the semi-supervised one (GCD's authors); plain k-means has 3


def main(args):
    if args.features not in ("raw", "pretrained"):
        raise UserError(f"--features {args.features} is unknown: choose raw or pretrained")
    check_positive(args, "n_init")
    check_used(args, "semi_supervised", True, "n_init")
    run = Run(args, "kmeans", pretrained=args.features == "pretrained")
    if run.finished:
        return
    finish(run, lambda z: (semi_supervised_kmeans(z, run.label["train"], run.K, run.num_known, args.seed, args.n_init, True)
                           if args.semi_supervised else kmeans(z, run.K, args.seed, n_init=3)[0]),
           ends=("seeded",) if args.semi_supervised else ())  # plain k-means is of the same features, held is this


if __name__ == "__main__":
    run_script(main, Args)
