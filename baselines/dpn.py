"""DPN: "Generalized Category Discovery with Decoupled Prototypical Network" (An et al., AAAI 2023). Files: see shared.py.

    python -m baselines.dpn --dataset clinc --gamma 10 --seed 0 --encoder minilm

The paper's five steps. Representation learning: CE + MLM. Prototype learning: of the known classes (labelled means) and of K
k-means clusters of all rows. Alignment and decoupling: bipartite matching says which clusters are the known classes.
Semantic-aware prototypical learning: (a) every row is drawn to the cluster prototypes near it, (b) the rows of the matched
clusters to the known classes' prototypes; (c) cross-entropy sees the labelled rows. EMA updating: (b)'s prototypes follow the
labelled means by a moving average. k-means at the end. Features are what a dense layer makes of the encoder's, from the first
step on; on what pretrain.py leaves, which lacks that layer and has a twentieth of the steps, k-means matches a quarter of the
known classes to clusters of others. Authors' code: github.com/Lackel/DPN, the settings from its run.sh, init_parameter.py and
data.py after the authors' corrections.
"""
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from baselines.shared import Flags, Run, align, dense_layer, dev_judge, finish, train
from make_lt_data import check_positive, check_shares, run_script
from seeding import kmeans

EPOCHS = {"clinc": 80, "banking": 60, "stackoverflow": 10}
GAMMA = {"stackoverflow": 90.0}  # else 10


@dataclass
class Args(Flags):
    pretrain_epochs: int = 100  # at most
    patience: int = 20  # epochs of pre-training without a better dev loss
    pretrain_batch_size: int = 32  # rows, and as many labelled ones beside them
    pretrain_lr: float = 5e-5  # AdamW
    mask_epochs: int = 5  # epochs that share one masking, since the trunk has to run for each; the authors have 1
    epochs: int = 0  # 0: 80 on CLINC, 60 on BANKING, 10 on StackOverflow
    batch_size: int = 256  # rows, and as many labelled ones beside them
    lr: float = 1e-5  # AdamW
    tau: float = 0.07  # sharpness of a row's weights on the prototypes
    known_weight: float = 0.0  # gamma of the paper: weight of (b); 0: 10, on StackOverflow 90
    ema: float = 0.9  # share of the old prototype in the moving average
    n_init: int = 20  # starts of both k-means


def prototype_loss(z, prototype, tau, distance):
    """(B,): the mean distance of each row of z (B, H) to prototype (n, H), weighted by softmax(cosine / tau)."""
    cosine = normalize(z, dim=1) @ normalize(prototype, dim=1).T
    return ((cosine / tau).softmax(1) * (1 - cosine if distance == "cosine" else torch.cdist(z, prototype))).sum(1)


def main(args):
    check_positive(args, "pretrain_epochs", "patience", "pretrain_batch_size", "pretrain_lr", "mask_epochs", "batch_size", "lr",
                   "tau", "n_init")
    check_positive(args, "epochs", "known_weight", or_zero=True)
    check_shares(args, "ema")
    run = Run(args, "dpn")
    if run.finished:
        return
    encoder, label, target = run.encoder, run.label["train"], {}
    weight = args.known_weight or GAMMA.get(args.dataset, 10.0)
    dense = dense_layer(run)
    classifier, head = (nn.Linear(encoder.hidden_size, n).to(run.device) for n in (run.num_known, run.K))
    encoder.limit_vocabulary(run.tokens["train"])

    def features(rows):  # not of unit length: it weighs (a) against (b)
        return dense(encoder.features(run.hidden["train"], rows))

    def mask(tokens, rate, generator):  # BERT's masking has a rate of its own
        masked, target["ids"] = encoder.mask_tokens(tokens, generator)  # which words to guess, as long as the view serves
        return masked

    def pretrain_loss(rows, memory):
        masked, drawn = run.view(memory["epoch"], mask, None, args.mask_epochs), run.draw_labelled(args.pretrain_batch_size)
        ce = cross_entropy(classifier(features(drawn)), label[drawn])
        return ce + encoder.mlm_loss(masked, rows, target["ids"])[0]

    train(run, "pretrain", {"dense": dense, "known": classifier, "mlm_head": encoder.mlm_head}, pretrain_loss,
          epochs=args.pretrain_epochs, batch_size=args.pretrain_batch_size, lr=args.pretrain_lr, bias_correction=True,
          judge=dev_judge(run, dense, classifier), patience=args.patience)
    run.views.clear()

    @torch.no_grad()
    def begin_epoch(memory, step):
        z = features(run.labelled)
        mean = torch.stack([z[label[run.labelled] == k].mean(0) for k in range(run.num_known)])
        if "known" in memory:
            memory["known"] = args.ema * memory["known"] + (1 - args.ema) * mean
            return
        centre, found = kmeans(dense(encoder.all_features(run.hidden["train"])), run.K, args.seed, args.n_init)
        matched = align(mean, centre)
        memory |= {"known": mean, "cluster": centre, "is_known": torch.isin(found, matched)}

    def batch_loss(rows, memory):
        z = features(rows)
        all_rows = prototype_loss(z, memory["cluster"], args.tau, "euclidean").mean()
        known = (prototype_loss(z, memory["known"], args.tau, "cosine") * memory["is_known"][rows]).mean()
        drawn = run.draw_labelled(args.batch_size)
        ce = cross_entropy(head(features(drawn)), label[drawn])
        return all_rows + weight * known + ce

    train(run, "last", {"dense": dense, "head": head}, batch_loss, epochs=args.epochs or EPOCHS.get(args.dataset, 80),
          batch_size=args.batch_size, lr=args.lr, begin_epoch=begin_epoch, bias_correction=True)
    finish(run, lambda z: kmeans(z, run.K, args.seed, args.n_init)[0], dense)


if __name__ == "__main__":
    run_script(main, Args)
