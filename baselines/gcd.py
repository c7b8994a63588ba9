"""GCD: "Generalized Category Discovery" (Vaze et al., CVPR 2022), for text. See shared.py for the files.

    python -m baselines.gcd --dataset clinc --gamma 10 --seed 0 --encoder minilm

One stage of contrastive learning from the encoder as it comes, (1 - lambda) L_u + lambda L_s (their Eq. 3): SimCLR on all rows
(Eq. 1) and SupCon on the labelled ones (Eq. 2), in batches that hold as many labelled rows as unlabelled ones. Then
semi-supervised k-means on the encoder's features (Sec. 3.1.2). Authors' code: github.com/sgvaze/generalized-category-discovery;
the settings for text are those of TEXTOIR (github.com/thuiar/TEXTOIR: its configs/GCD.py and the method's manager.py), save
lambda, which is the paper's.
"""
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import normalize

from baselines.shared import Flags, Run, finish, supervised_contrast, train
from losses import instance_wise_loss
from make_lt_data import check_positive, check_shares, run_script
from metrics import match_clusters
from seeding import kmeans, semi_supervised_kmeans


@dataclass
class Args(Flags):
    epochs: int = 100  # at most (TEXTOIR; the paper has 200 on images)
    patience: int = 20  # epochs without better k-means on dev after which it stops (TEXTOIR)
    batch_size: int = 128  # rows drawn, each in two views (TEXTOIR, and the paper)
    lr: float = 5e-5  # AdamW (TEXTOIR; its lack of bias correction is left out, with which k-means on dev is worse)
    sup_weight: float = 0.35  # lambda (paper, Sec. 4.1)
    tau: float = 0.07  # of both losses (TEXTOIR; the authors' script has 1.0 for L_u)
    replace_rate: float = 0.25  # tokens replaced in the second view; the frozen layers have no dropout, TEXTOIR's only view
    view_epochs: int = 2  # epochs that share the second view, since the trunk has to run for each
    projection: int = 256  # width of the projection (TEXTOIR: 768 -> 768 -> 256)
    n_init: int = 100  # starts of the semi-supervised k-means (authors' script)


def main(args):
    check_positive(args, "epochs", "patience", "batch_size", "lr", "tau", "projection", "n_init", "view_epochs")
    check_shares(args, "sup_weight", "replace_rate")
    run = Run(args, "gcd")
    if run.finished:
        return
    encoder, label = run.encoder, run.label["train"]
    H = encoder.hidden_size
    head = nn.Sequential(nn.Linear(H, H), nn.ReLU(), nn.Linear(H, args.projection)).to(run.device)
    # An unlabelled row is drawn so much more rarely that a batch holds as many of either kind.
    unlabelled = max(1, len(label) - len(run.labelled))
    weight = torch.where(label >= 0, 1.0, len(run.labelled) / unlabelled)

    def batch_loss(rows, memory):
        rows = torch.multinomial(weight, len(rows), replacement=True)
        view = run.view(memory["epoch"], encoder.replace_tokens, args.replace_rate, args.view_epochs)
        z = torch.stack([encoder.features(run.hidden["train"], rows), encoder.features(view, rows)], 1)
        z = normalize(head(z), dim=2)
        held = label[rows] >= 0
        supervised = supervised_contrast(z[held], label[rows][held], args.tau) if held.sum() > 1 else 0.0
        return (1 - args.sup_weight) * instance_wise_loss(z, args.tau).mean() + args.sup_weight * supervised

    def judge(memory):
        found = kmeans(run.unit_features("dev"), run.num_known, args.seed)[1].cpu().numpy()
        truth = run.labels["dev"]
        return -100 * float((match_clusters(truth, found)[found] == truth).sum()) / len(truth)  # minus ACC

    train(run, "last", {"head": head}, batch_loss, epochs=args.epochs, batch_size=args.batch_size, lr=args.lr,
          judge=judge if len(run.labels["dev"]) >= run.num_known > 1 else None, patience=args.patience, bias_correction=True)
    finish(run, lambda z: semi_supervised_kmeans(z, label, run.K, run.num_known, args.seed, args.n_init, True),
           ends=("seeded",))


if __name__ == "__main__":
    run_script(main, Args)
