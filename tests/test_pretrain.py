"""What pretrain.py and encoder.py do within a run that no figure of a finished run shows, on a tiny corpus and encoder."""
import json
import shutil

import numpy as np
import pytest
import torch
from conftest import TINY_PRETRAIN, read_tsv
from torch.nn.functional import cross_entropy, normalize

import pretrain
import train_imbanid
from encoder import Dropout, Encoder
from make_lt_data import UserError, parse_args
from seeding import class_means

ON_CPU = torch.device("cpu"), torch.float32
FAST = "--lr", 0.05, "--head_lr", 0.5  # an early epoch is the best of many


def pre_trained(task, out, encoder, *flags):
    """pretrain.pt of a pre-training in this process, written to out."""
    words = *task[:-1], out, "--encoder", encoder, *TINY_PRETRAIN, *flags
    pretrain.main(parse_args(pretrain.Args, [str(word) for word in words]))
    return torch.load(out / "demo_g4_s0/pretrain.pt", weights_only=True)


@pytest.fixture
def encoder(tiny_encoder):
    return Encoder(str(tiny_encoder), 32, *ON_CPU)


def test_the_kept_weights_are_those_of_the_best_epoch(tiny_run, tiny_encoder, encoder, tmp_path):
    found = pre_trained(tiny_run[0], tmp_path, tiny_encoder, "--epochs", 60, "--patience", 2, *FAST)
    data = tiny_run[1] / "data/demo_g4_s0"
    pretrain.load_trained_layers(encoder, found)
    texts, label = [row[0] for row in read_tsv(data / "dev.tsv")[1:]], torch.from_numpy(np.load(data / "dev_label.npy"))
    z = normalize(encoder.all_features(encoder.trunk(encoder.tokenize(texts))), dim=1)
    logits = z @ normalize(found["classifier"], dim=1).T / found["config"]["temperature"]
    assert found["epoch"] < len(found["log"])
    assert float(cross_entropy(logits, label)) == pytest.approx(found["dev_loss"], rel=1e-4)


def test_a_run_stopped_behind_its_best_epoch_keeps_that_and_its_masks(tiny_run, tiny_encoder, tmp_path, monkeypatch):
    flags, save = ("--epochs", 9, "--patience", 9, "--mask_epochs", 3, *FAST), pretrain.save_checkpoint

    def stop(path, **state):
        save(path, **state)
        if path.name == "pretrain_part.pt" and state["epoch"] == 7:
            raise KeyboardInterrupt

    whole = pre_trained(tiny_run[0], tmp_path / "whole", tiny_encoder, *flags)
    monkeypatch.setattr(pretrain, "save_checkpoint", stop)
    with pytest.raises(KeyboardInterrupt):
        pre_trained(tiny_run[0], tmp_path / "cut", tiny_encoder, *flags)
    monkeypatch.setattr(pretrain, "save_checkpoint", save)
    cut = pre_trained(tiny_run[0], tmp_path / "cut", tiny_encoder, *flags)
    assert whole["epoch"] <= 7 and cut["epoch"] == whole["epoch"] and cut["log"] == whole["log"]
    assert all(torch.equal(p, whole["trained_layers"][name]) for name, p in cut["trained_layers"].items())


def test_epochs_and_seeds_have_batches_of_their_own():
    order = [torch.randperm(50, generator=pretrain.seed_epoch(*which)) for which in ((0, 1), (0, 2), (1, 1))]
    assert not torch.equal(order[0], order[1]) and not torch.equal(order[0], order[2])


def test_a_step_takes_the_clipped_gradient_and_forgets_the_last():
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p], lr=1.0)
    for slope, expected in (([30.0, 40.0], [-0.6, -0.8]), ([0.1, 0.0], [-0.7, -0.8])):
        pretrain.joint_step((torch.tensor(slope) * p).sum(), optimizer, "", torch.arange(1))
        assert torch.allclose(p.detach(), torch.tensor(expected), atol=1e-4)


def test_labelled_batches_dropout_and_weight_decay(tiny_run, tiny_encoder, tmp_path, monkeypatch):
    drawn, dropout, groups, loss_of, step = set(), set(), [], pretrain.batch_loss, pretrain.joint_step

    def batch_loss(encoder, *given):
        dropout.add(all(part.training for part in encoder.trained_layers.modules()))
        drawn.update(given[6].tolist())
        return loss_of(encoder, *given)

    def joint_step(loss, optimizer, *more):
        groups.append({(group["lr"], group["weight_decay"]) for group in optimizer.param_groups})
        step(loss, optimizer, *more)

    monkeypatch.setattr(pretrain, "batch_loss", batch_loss)
    monkeypatch.setattr(pretrain, "joint_step", joint_step)
    pre_trained(tiny_run[0], tmp_path, tiny_encoder, "--labeled_batch_size", 4, "--lr", 1e-5, "--head_lr", 1e-4)
    assert len(drawn) > 10 and dropout == {True} and groups[0] == {(1e-5, 0.01), (1e-4, 0.01)}


@pytest.mark.parametrize("name", ["train.tsv", "dev.tsv", "test.tsv", "train_label.npy", "dev_label.npy", "labels.txt"])
def test_data_that_has_changed_is_seen(tiny_run, tmp_path, name):
    data = shutil.copytree(tiny_run[1] / "data/demo_g4_s0", tmp_path / "data")
    before = pretrain.data_fingerprint(data)
    (data / name).write_bytes((data / name).read_bytes() + b"x")
    assert pretrain.data_fingerprint(data) != before


def test_word_vectors_that_have_changed_are_seen(tiny_encoder, encoder, tmp_path):
    from safetensors.torch import load_file, save_file
    folder = shutil.copytree(tiny_encoder, tmp_path / "encoder")
    weights = load_file(folder / "model.safetensors")
    weights["bert.embeddings.word_embeddings.weight"][7, 0] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert Encoder(str(folder), 32, *ON_CPU).fingerprint != encoder.fingerprint


def test_another_tokenizer_is_seen(tiny_encoder, encoder, tmp_path):
    """The same weights would read other words; of an older checkpoint the weights alone are known."""
    for name, word, other in (("tokenizer.json", '"alarm"', '"alarms"'),
                              ("tokenizer_config.json", '"do_lower_case": true', '"do_lower_case": false')):
        folder = shutil.copytree(tiny_encoder, tmp_path / name)
        text = json.dumps(json.loads((folder / name).read_text()))
        assert text.count(word) == 1
        (folder / name).write_text(text.replace(word, other))
        changed = Encoder(str(folder), 32, *ON_CPU)
        pretrain.check_trunk(changed, {"trunk": encoder.fingerprint[:64]})
        with pytest.raises(UserError, match="tokenizer of --encoder"):
            pretrain.check_trunk(changed, {"trunk": encoder.fingerprint})


def test_masks_are_drawn_by_their_generator(encoder):
    tokens, masked = encoder.tokenize(["set an alarm for six in the morning"] * 20), []
    for i, seed in enumerate((5, 5, 6)):
        torch.manual_seed(i)
        masked.append(encoder.mask_tokens(tokens, torch.Generator().manual_seed(seed))[0].values)
    assert torch.equal(masked[0], masked[1]) and not torch.equal(masked[0], masked[2])


def test_no_word_is_replaced_by_a_special_token(encoder):
    tokens = encoder.tokenize(["set an alarm for six in the morning"] * 3000)
    replaced = encoder.replace_tokens(tokens, 1.0, torch.Generator().manual_seed(0))
    assert torch.equal(encoder.special(replaced), encoder.special(tokens))


def test_a_limited_vocabulary_keeps_the_biases_of_its_words(encoder):
    bias = encoder._frozen[0].get_output_embeddings().bias
    with torch.no_grad():
        bias.copy_(torch.arange(len(bias)))
    tokens = encoder.tokenize(["open the door"])
    encoder.limit_vocabulary(tokens)
    assert torch.equal(encoder._frozen[0].get_output_embeddings().bias.detach(), tokens.values.unique().float())


def test_an_encoder_that_knows_no_word_is_refused(tiny_run, tiny_encoder, tmp_path, monkeypatch):
    real = Encoder.tokenize

    def unknown(self, texts):
        tokens = real(self, texts)
        tokens.values[~self.special(tokens)] = self.tokenizer.unk_token_id
        return tokens

    monkeypatch.setattr(Encoder, "tokenize", unknown)
    with pytest.raises(UserError, match="knows hardly any of the words"):
        pre_trained(tiny_run[0], tmp_path, tiny_encoder)


def test_words_are_replaced_at_the_rate_and_by_their_generator(encoder):
    tokens, found = encoder.tokenize(["set an alarm for six in the morning"] * 3000), []
    for i, seed in enumerate((5, 5, 6)):
        torch.manual_seed(i)
        found.append(encoder.replace_tokens(tokens, 0.25, torch.Generator().manual_seed(seed)).values)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    ordinary = ~encoder.special(tokens)
    assert float((found[0] != tokens.values)[ordinary].float().mean()) == pytest.approx(0.25, abs=0.01)


def test_what_is_minimised_is_the_sum_of_both_losses(tiny_run, tiny_encoder, tmp_path, monkeypatch):
    parts, losses, loss_of, step = [], [], pretrain.batch_loss, pretrain.joint_step
    monkeypatch.setattr(pretrain, "batch_loss", lambda *given: parts.append(loss_of(*given)) or parts[-1])
    monkeypatch.setattr(pretrain, "joint_step", lambda loss, *given: losses.append(float(loss.detach())) or step(loss, *given))
    pre_trained(tiny_run[0], tmp_path, tiny_encoder)
    assert losses == pytest.approx([float((ce + mlm).detach()) for ce, mlm in parts])


@pytest.mark.parametrize("stage, name", [("pretrain", "mask_tokens"), ("train_imbanid", "replace_tokens")])
def test_a_drawing_serves_so_many_epochs(tiny_run, tiny_encoder, tmp_path, monkeypatch, stage, name):
    drawn, steps, draw, step = [], [], getattr(Encoder, name), pretrain.joint_step
    monkeypatch.setattr(Encoder, name, lambda self, *given: drawn.append((len(steps), given[-1].initial_seed())) or draw(
        self, *given))
    monkeypatch.setattr(pretrain, "joint_step", lambda *given: steps.append(0) or step(*given))
    flags = "--epochs", "5"
    if stage == "pretrain":
        pre_trained(tiny_run[0], tmp_path, tiny_encoder, *flags, "--mask_epochs", 2)
    else:
        words = *tiny_run[0], *flags, "--batch_size", 64, "--min_steps", 0, "--view_epochs", 2, "--tag", "drawings"
        train_imbanid.main(parse_args(train_imbanid.Args, [str(word) for word in words]))
    assert [n for n, _ in drawn] == [0, 6, 12] and len({seed for _, seed in drawn}) == 3  # an epoch has three batches


def test_the_classifier_starts_as_class_means_and_the_language_model_head_trains(tiny_run, tiny_encoder, encoder, tmp_path):
    data = tiny_run[1] / "data/demo_g4_s0"
    label, texts = torch.from_numpy(np.load(data / "train_label.npy")), [row[0] for row in read_tsv(data / "train.tsv")[1:]]
    found = pre_trained(tiny_run[0], tmp_path / "still", tiny_encoder, "--epochs", 1, "--lr", 1e-12, "--head_lr", 1e-12)
    z = normalize(encoder.all_features(encoder.trunk(encoder.tokenize(texts))), dim=1)
    assert torch.allclose(found["classifier"], class_means(z, label, len(found["classifier"])), atol=1e-5)
    moved = pre_trained(tiny_run[0], tmp_path / "moved", tiny_encoder, "--epochs", 9, "--max_steps", 4)
    assert len(moved["log"]) == 2, "an epoch has three batches"
    assert not any(torch.equal(moved["mlm_head"][name], value) for name, value in found["mlm_head"].items())


def test_word_vectors_stay_frozen_in_a_limited_vocabulary(encoder):
    encoder.limit_vocabulary(encoder.tokenize(["open the door"]))
    assert not encoder._frozen[0].get_output_embeddings().weight.requires_grad


def test_dropout_of_the_trained_layers_is_that_of_their_model(encoder):
    assert [part.p for part in encoder.trained_layers.modules() if isinstance(part, Dropout)] == [0.1] * 3


def test_each_seed_epoch_process_and_part_of_an_epoch_has_a_dropout_of_its_own():
    drawn = []
    for which in ((0, 1), (1, 1), (0, 2), (0, 1, 1), (0, 1, 0, 50)):
        pretrain.seed_epoch(*which)
        drawn.append(float(torch.rand(())))
    assert len(set(drawn)) == 5


def test_lr_is_of_the_layers_and_head_lr_of_the_heads(tiny_run, tiny_encoder, encoder, tmp_path):
    start = pretrain.trained_state(encoder.trained_layers)
    for lr, head_lr in ((1e-12, 0.01), (0.01, 1e-12)):
        found = pre_trained(tiny_run[0], tmp_path / str(lr), tiny_encoder, "--epochs", 1, "--lr", lr, "--head_lr", head_lr)
        moved = max(float((p - start[name]).abs().max()) for name, p in found["trained_layers"].items())
        assert (moved > 1e-3) == (lr > head_lr)


def test_of_bfloat16_states_means_and_losses_are_float32(tiny_encoder):
    encoder, rows = Encoder(str(tiny_encoder), 32, torch.device("cpu"), torch.bfloat16), torch.arange(1)
    tokens = encoder.tokenize(["set an alarm for six in the morning"])
    hidden = encoder.trunk(tokens)
    (_, states, _, _), = encoder.trained_out(hidden, rows)
    assert torch.allclose(encoder.features(hidden, rows)[0], states.float().mean(0), atol=1e-6)
    assert encoder.mlm_loss(hidden, rows, tokens)[0].dtype == torch.float32


def test_a_replaced_word_may_become_any_word(encoder):
    tokens = encoder.tokenize(["set an alarm for six in the morning"] * 3000)
    drawn = encoder.replace_tokens(tokens, 1.0, torch.Generator().manual_seed(0)).values[~encoder.special(tokens)]
    assert len(drawn.unique()) > 0.9 * (len(encoder.tokenizer) - 5)


def test_every_flag_tells_runs_apart_but_those_that_say_where_and_how_long_they_go():
    for args in (pretrain.Args(), train_imbanid.Args()):
        left_out = vars(args).keys() - pretrain.settings(args, torch.float32).keys()
        assert left_out <= {"data_dir", "out_dir", "cache_gb", "restart", "device", "tag", "min_steps"}


def test_words_are_masked_at_berts_rates(encoder):
    tokens = encoder.tokenize(["set an alarm for six in the morning"] * 3000)
    masked, target = encoder.mask_tokens(tokens, torch.Generator().manual_seed(0))
    wanted, mask = target.values >= 0, encoder.tokenizer.mask_token_id
    assert float(wanted[~encoder.special(tokens)].float().mean()) == pytest.approx(0.15, abs=0.01)
    found, before = masked.values[wanted], tokens.values[wanted]
    assert float((found == mask).float().mean()) == pytest.approx(0.8, abs=0.02)
    assert float((found == before).float().mean()) == pytest.approx(0.1, abs=0.02)
