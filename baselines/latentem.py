"""LatentEM: "A Probabilistic Framework for Discovering New Intents" (Zhou et al., ACL 2023). See shared.py for the files.

    python -m baselines.latentem --dataset clinc --gamma 10 --seed 0 --encoder minilm

After pre-training (with CE + MLM, as in their README's comparison with MTP, or with --ce_only as in their run.sh), the
assignments of all rows are latent. E-step: k-means, and every labelled row passes its label on to the nearest unlabelled row
of its cluster. M-step: contrast between the rows that share an assignment, which raises the likelihood of the assignments, and
cross-entropy on the rows with a label, which keeps what is known of them. k-means at the end. Authors' code:
github.com/zyh190507/Probabilistic-discovery-new-intents, from whose run.sh the settings are (there is none for StackOverflow).
"""
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from baselines.shared import Flags, Run, dense_layer, finish, pretrain_on_known, train
from losses import contrast_log_prob
from make_lt_data import check_positive, check_shares, check_used, run_script
from seeding import kmeans


@dataclass
class Args(Flags):
    epochs: int = 100  # fixed
    batch_size: int = 512  # of both stages
    lr: float = 5e-5  # of both stages
    ce_only: bool = False  # pre-train with cross-entropy on the labelled rows instead of starting from pretrain.pt
    pretrain_epochs: int = 100  # with ce_only, at most
    patience: int = 20  # with ce_only: epochs of pre-training without a better dev loss
    ce_weight: float = 0.6  # beta: weight of cross-entropy, the contrast has the rest
    tau: float = 0.1  # temperature


def pass_labels_on(z, label, cluster):
    """label (N,) with each labelled row's label given to the unlabelled row of its cluster that is nearest by cosine."""
    spread = label.clone()
    held, free = torch.where(label >= 0)[0], torch.where(label < 0)[0]
    similarity = (z[held] @ z[free].T).masked_fill(cluster[held, None] != cluster[free], float("-inf"))
    best = similarity.max(1)
    reached = best.values > float("-inf")
    spread[free[best.indices[reached]]] = label[held[reached]]
    return spread


def assignment_loss(p, cluster, tau):
    """-log softmax of p_i . p_j / tau over j != i, mean over the pairs (i, j) that share a cluster. p: (B, H) unit length."""
    pair = (cluster[:, None] == cluster).fill_diagonal_(False)
    return -contrast_log_prob(p[:, None], tau)[pair].sum() / pair.sum().clamp_min(1)


def main(args):
    check_positive(args, "pretrain_epochs", "patience", "epochs", "batch_size", "lr", "tau")
    check_shares(args, "ce_weight")
    check_used(args, "ce_only", True, "pretrain_epochs", "patience")
    run = Run(args, "latentem", pretrained=not args.ce_only)
    if run.finished:
        return
    encoder, dense, H = run.encoder, dense_layer(run), run.encoder.hidden_size
    known = nn.Linear(H, run.num_known).to(run.device)
    projection = nn.Sequential(nn.Linear(H, 2 * H), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2 * H, H), nn.ReLU(),
                               nn.Dropout(0.1)).to(run.device)
    if not args.ce_only:  # its classifier goes on: cosine at a temperature, here as a linear layer
        with torch.no_grad():
            length = dense.eval()(encoder.all_features(run.hidden["train"])).norm(dim=1).mean()
        known.weight.data = normalize(run.pre["classifier"], dim=1).to(run.device) / (run.pre["config"]["temperature"] * length)
        known.bias.data.zero_()
    else:
        pretrain_on_known(run, dense, known)

    def begin_epoch(memory, step):
        z = run.unit_features(dense=dense)
        memory["cluster"] = kmeans(z, run.K, args.seed + memory["epoch"])[1]
        memory["label"] = pass_labels_on(z, run.label["train"], memory["cluster"])

    def batch_loss(rows, memory):
        z = dense(encoder.features(run.hidden["train"], rows))
        contrast = assignment_loss(normalize(projection(z), dim=1), memory["cluster"][rows], args.tau)
        y = memory["label"][rows]
        ce = cross_entropy(known(z[y >= 0]), y[y >= 0]) if (y >= 0).any() else 0.0
        return (1 - args.ce_weight) * contrast + args.ce_weight * ce

    train(run, "last", {"dense": dense, "known": known, "projection": projection}, batch_loss, epochs=args.epochs,
          batch_size=args.batch_size, lr=args.lr, begin_epoch=begin_epoch)
    finish(run, lambda z: kmeans(z, run.K, args.seed)[0], dense)


if __name__ == "__main__":
    run_script(main, Args)
