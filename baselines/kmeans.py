"""k-means, and semi-supervised k-means, on features nobody trained, or on pre-trained ones. See shared.py for the files.

    python -m baselines.kmeans --dataset clinc --gamma 10 --seed 0 --encoder minilm
    python -m baselines.kmeans --features pretrained --semi_supervised --tag ss_pretrained --encoder minilm

What any training has to beat. Semi-supervised: the labelled rows are held in their classes, whose means are the first centres.
"""
from dataclasses import dataclass

from baselines.shared import Flags, Run, finish, kmeans
from make_lt_data import UserError, run_script
from pretrain import semi_supervised_kmeans


@dataclass
class Args(Flags):
    features: str = "raw"  # raw: of the encoder as it comes; pretrained: after pretrain.py
    semi_supervised: bool = False  # hold the labelled rows in their classes


def main(args):
    if args.features not in ("raw", "pretrained"):
        raise UserError(f"--features {args.features} is unknown: choose raw or pretrained")
    run = Run(args, "kmeans", pretrained=args.features == "pretrained")
    if run.finished:
        return
    finish(run, lambda z: (semi_supervised_kmeans(z, run.label["train"], run.K, run.num_known, args.seed)
                           if args.semi_supervised else kmeans(z, run.K, args.seed, n_init=3)[0]))


if __name__ == "__main__":
    run_script(main, Args)
