"""USNID (semi-supervised): "A Clustering Framework for Unsupervised and Semi-supervised New Intent Discovery" (Zhang et al.,
TKDE 2023). See shared.py for the files.

    python -m baselines.usnid --dataset clinc --gamma 10 --seed 0 --encoder minilm

Pre-training: cross-entropy on labelled rows, and SupCon on labelled and unlabelled ones, of which an unlabelled row has only
its own second view as a positive. Then, epoch by epoch: SupCon on the labelled rows; k-means that starts from the centroids of
the epoch before, so that a cluster keeps its number; cross-entropy and SupCon on these pseudo-labels, in two views with 40 % of
the tokens erased. It ends when hardly a row changes its cluster. Authors' code: github.com/thuiar/TEXTOIR, settings of its
configs/SemiUSNID.py.
"""
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize, pad

from baselines.shared import Flags, Run, dense_layer, dev_judge, finish, supervised_contrast, train
from encoder import Packed, part_of_each
from make_lt_data import check_positive, check_shares, run_script
from seeding import kmeans

TAU = {"clinc": 0.1}  # else 0.05
LR = {"stackoverflow": 2e-5}  # else 1e-5


@dataclass
class Args(Flags):
    pretrain_epochs: int = 100  # at most
    patience: int = 10  # epochs of pre-training without a better dev loss
    pretrain_lr: float = 5e-5  # AdamW
    pretrain_tau: float = 0.07  # temperature of SupCon
    epochs: int = 100  # at most
    batch_size: int = 128  # unlabelled rows in pre-training, with as many labelled ones beside them; rows in training
    lr: float = 0.0  # 0: 1e-5, on StackOverflow 2e-5
    tau: float = 0.0  # 0: 0.1 on CLINC, else 0.05
    erase_rate: float = 0.4  # tokens erased in a view
    view_epochs: int = 2  # epochs that share the views, since the trunk has to run for each; the authors have 1
    tolerance: float = 0.0005  # share of rows with another pseudo-label than an epoch ago below which it ends


def erase_tokens(encoder):
    """The augmentation: floor(rate n) of the n ordinary tokens of every row are left out."""
    def erase(tokens, rate, generator):
        lengths, special = tokens.lengths, encoder.special(tokens)
        row = part_of_each(lengths)
        ordinary = torch.zeros_like(lengths).index_add_(0, row, (~special).long())
        chance = torch.rand(len(row), generator=generator).to(row.device) + special  # special tokens come last
        order = torch.argsort(chance)
        order = order[torch.argsort(row[order], stable=True)]
        rank = torch.empty_like(row)
        rank[order] = torch.arange(len(row), device=row.device) - tokens.offsets[:-1][row[order]]
        kept = rank >= (rate * ordinary).long()[row]
        lengths = torch.zeros_like(lengths).index_add_(0, row, kept.long())
        return Packed(tokens.values[kept], pad(lengths.cumsum(0), (1, 0)))
    return erase


def main(args):
    check_positive(args, "pretrain_epochs", "patience", "pretrain_lr", "pretrain_tau", "epochs", "batch_size", "view_epochs")
    check_positive(args, "lr", "tau", or_zero=True)
    check_shares(args, "erase_rate", "tolerance")
    run = Run(args, "usnid")
    if run.finished:
        return
    encoder, label, H = run.encoder, run.label["train"], run.encoder.hidden_size
    dense = dense_layer(run, nn.Identity)  # the authors' tanh is computed and thrown away
    known, known_contrast, head, contrast = (nn.Linear(H, n).to(run.device) for n in 2 * [run.num_known] + 2 * [run.K])
    tau, unlabelled = args.tau or TAU.get(args.dataset, 0.05), torch.where(label < 0)[0]

    def two_views(rows, layer, *views):
        """Features (B, 2, H) of rows, and (B, 2, n) unit outputs of the contrastive layer."""
        z = torch.stack([dense(encoder.features(view, rows)) for view in views], 1)
        return z, normalize(layer(z), dim=2)

    def pretrain_loss(rows, memory):
        drawn = run.draw_labelled(args.batch_size)
        both = torch.cat([drawn, rows])
        z, p = two_views(both, known_contrast, run.hidden["train"], run.hidden["train"])
        return cross_entropy(known(z[:len(drawn), 0]), label[drawn]) + supervised_contrast(p, label[both], args.pretrain_tau)

    train(run, "pretrain", {"dense": dense, "known": known, "contrast": known_contrast}, pretrain_loss,
          epochs=args.pretrain_epochs, batch_size=args.batch_size, lr=args.pretrain_lr, rows=unlabelled,
          judge=dev_judge(run, dense, known), patience=args.patience)

    def begin_epoch(memory, step):
        dense.train()
        encoder.train()
        for rows in run.labelled[torch.randperm(len(run.labelled)).to(run.device)].split(args.batch_size):
            z = two_views(rows, contrast, run.hidden["train"], run.hidden["train"])[1]
            step(supervised_contrast(z, label[rows], tau), rows)
        dense.eval()
        encoder.eval()
        before = memory.get("pseudo_label")
        memory["centre"], memory["pseudo_label"] = kmeans(run.unit_features(dense=dense), run.K, args.seed,
                                                          init=memory.get("centre"))
        return before is not None and float((before != memory["pseudo_label"]).float().mean()) < args.tolerance

    def batch_loss(rows, memory):
        views = (run.view(memory["epoch"], erase_tokens(encoder), args.erase_rate, args.view_epochs, copy) for copy in (0, 1))
        z, p = two_views(rows, contrast, *views)
        y = memory["pseudo_label"][rows]
        return cross_entropy(head(z).flatten(0, 1), y.repeat_interleave(2)) + supervised_contrast(p, y, tau)

    last = train(run, "last", {"dense": dense, "head": head, "contrast": contrast}, batch_loss, epochs=args.epochs,
                 batch_size=args.batch_size, lr=args.lr or LR.get(args.dataset, 1e-5), begin_epoch=begin_epoch,
                 more_steps=-(-len(run.labelled) // args.batch_size))
    finish(run, lambda z: kmeans(z, run.K, args.seed, init=last["centre"])[0], dense)


if __name__ == "__main__":
    run_script(main, Args)
