"""DeepAligned: "Discovering New Intents with Deep Aligned Clustering" (Zhang et al., AAAI 2021). See shared.py for the files.

    python -m baselines.deepaligned --dataset clinc --gamma 10 --seed 0 --encoder minilm

Cross-entropy on the labelled rows; then, epoch by epoch, k-means on the features of all rows, its centroids matched to those
of the epoch before by the Hungarian algorithm, so that the pseudo-labels stay comparable and the new K-way head can go on from
epoch to epoch, and one pass of cross-entropy on them. The state with the best silhouette is kept.
Authors' code: github.com/thuiar/DeepAligned-Clustering, from whose init_parameter.py the settings are.
"""
from dataclasses import dataclass

import torch
from sklearn.metrics import silhouette_score
from torch import nn
from torch.nn.functional import cross_entropy

from baselines.shared import Flags, Run, align, dense_layer, finish, pretrain_on_known, train
from make_lt_data import check_positive, run_script
from seeding import kmeans


@dataclass
class Args(Flags):
    pretrain_epochs: int = 100  # at most
    epochs: int = 100  # at most
    patience: int = 20  # epochs without a better dev loss, or a better silhouette
    batch_size: int = 128  # of both stages
    lr: float = 5e-5  # of both stages


def main(args):
    check_positive(args, "pretrain_epochs", "epochs", "patience", "batch_size", "lr")
    run = Run(args, "deepaligned")
    if run.finished:
        return
    encoder, dense = run.encoder, dense_layer(run)
    known, head = (nn.Linear(encoder.hidden_size, n).to(run.device) for n in (run.num_known, run.K))
    pretrain_on_known(run, dense, known)

    @torch.no_grad()
    def cluster(memory):
        """Aligned pseudo-labels of the features as they are, and minus their silhouette."""
        z = run.unit_features(dense=dense)
        centre, found = kmeans(z, run.K, args.seed + memory.get("epoch", 0))
        order = align(memory["centre"], centre) if "centre" in memory else torch.arange(run.K, device=z.device)
        memory |= {"centre": centre[order], "pseudo_label": torch.argsort(order)[found]}
        return -float(silhouette_score(z.cpu().numpy(), found.cpu().numpy()))

    def batch_loss(rows, memory):
        return cross_entropy(head(dense(encoder.features(run.hidden["train"], rows))), memory["pseudo_label"][rows])

    best = train(run, "last", {"dense": dense, "head": head}, batch_loss, epochs=args.epochs, batch_size=args.batch_size,
                 lr=args.lr, judge=cluster, judge_start=True, patience=args.patience)
    finish(run, lambda z: best["centre"], dense)


if __name__ == "__main__":
    run_script(main, Args)
