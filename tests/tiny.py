"""Encoders too small to know anything, for the tests and for check_gpu.py, which cannot import conftest: it hides all GPUs."""
import csv
from pathlib import Path

import torch
from transformers import BertConfig, BertForMaskedLM, BertTokenizer, MPNetConfig, MPNetForMaskedLM
from transformers.utils import logging

DEMO = Path(__file__).resolve().parent.parent / "data/raw/demo/train.tsv"


def make_encoder(folder, hidden_size=32, layers=2, heads=2, dropout=0.1, mpnet=False):
    """A BERT or an MPNet of random weights that knows the words of the demo corpus, as a local model folder."""
    with open(DEMO, encoding="utf-8", newline="") as f:
        rows = [*csv.reader(f, delimiter="\t")][1:]
    words = sorted({w for row in rows for w in row[0].lower().split() if w.isalpha()})
    vocab = ["[PAD]", "[UNK]"][::-1 if mpnet else 1] + ["[CLS]", "[SEP]", "[MASK]", *words]  # where either expects padding
    BertTokenizer(vocab={word: i for i, word in enumerate(vocab)}, do_lower_case=True).save_pretrained(folder)
    torch.manual_seed(0)
    config, model = (MPNetConfig, MPNetForMaskedLM) if mpnet else (BertConfig, BertForMaskedLM)
    model = model(config(vocab_size=len(vocab), hidden_size=hidden_size, num_hidden_layers=layers, num_attention_heads=heads,
                         intermediate_size=2 * hidden_size, max_position_embeddings=64 + 2 * mpnet, hidden_dropout_prob=dropout,
                         attention_probs_dropout_prob=dropout))  # an MPNet's first places belong to padding
    if mpnet:
        torch.nn.init.normal_(model.mpnet.encoder.relative_attention_bias.weight, std=2)  # as drawn it does hardly a thing
    logging.disable_progress_bar()  # one for a file of a few kB
    model.save_pretrained(folder)
