"""Taking a team home: PEFT folders with cards, merged models, and chat files that TRL trains on."""

from __future__ import annotations

import base64
import http.server
import json
import re
import shutil
import sys
import threading

import pytest
import torch
import yaml
from helpers_models import tiny_model, tiny_tokenizer
from huggingface_hub import HfApi

from mafrt.config.agent import LoraSpec
from mafrt.config.team import AgentSpec
from mafrt.core.errors import ConfigError
from mafrt.core.shipped import TEACHING_BASE
from mafrt.models.shared_base import SharedBase
from mafrt.runners.intervals import interval
from mafrt.scripts import collect, export, train_math
from mafrt.scripts.exporting import hub as exported_hub
from mafrt.scripts.exporting.gguf_adapters import check_modelfile, modelfile, write_gguf_adapter
from mafrt.scripts.exporting.merged import write_merged
from mafrt.scripts.reporting.episodes import read_episodes

SHORT = [
    "--iterations",
    "1",
    "--n_rollout_threads",
    "8",
    "--max_new_tokens",
    "16",
    "--coach",
    "rules",
    "--eval_episodes",
    "4",
]
SHORT += [
    "--eval_samples",
    "1",
    "--ppo_epoch",
    "1",
    "--profile_path",
    "profiles/quickstart_math.json",
    "--threads",
    "1",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one iteration on the shipped base."""
    folder = tmp_path_factory.mktemp("export") / "run"
    assert train_math.main([*SHORT, "--run_dir", str(folder)]) == 0
    return folder


def test_an_export_loads_in_peft_and_says_everything(run, tmp_path, capsys):
    target = tmp_path / "team"
    assert export.main([str(run), "--output", str(target)]) == 0
    out = capsys.readouterr().out
    command = next(line for line in out.splitlines() if line.startswith("vllm serve"))
    assert command.split()[2] == str(TEACHING_BASE) and "--max-loras 2 --max-lora-rank 8" in command
    assert f"reasoner={target / 'reasoner'}" in command and f"actor={target / 'actor'}" in command

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(TEACHING_BASE)
    ids = torch.tensor([[5, 6, 7, 8]])
    before = plain(ids).logits
    model = PeftModel.from_pretrained(plain, str(target / "actor"))
    with torch.no_grad():
        assert (model(ids).logits - before).abs().max() > 0  # it learnt something
    card = (target / "actor" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\npipeline_tag: text-generation\n") and "You are the Actor." in card
    assert (target / "actor" / "role_prompt.txt").read_text().startswith("You are the Actor.")
    page = (target / "README.md").read_text()
    here = command.replace(f"{target}/", "./").replace(str(TEACHING_BASE), "teaching-base")
    assert here in page and "algorithm: ppo" in page
    assert re.search(r"\| eval/greedy \| \d\.\d+ \(.* to .*\) \| 4 \| 1 \|", page)
    assert str(target) not in page and str(run) not in page  # no folder of the machine
    assert "{%" in (target / "chat_template.jinja").read_text()
    assert json.loads((target / "team.json").read_text())[0]["role"] == "reasoner"

    assert export.main([str(run), "--output", str(target)]) == 2
    assert "holds an earlier export" in capsys.readouterr().err
    assert export.main([str(run), "--output", str(target), "--overwrite"]) == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    assert export.main([str(run), "--output", str(tmp_path / "mine"), "--overwrite"]) == 2
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


@pytest.mark.slow
@pytest.mark.ci
def test_merged_models_compute_as_their_adapters(run, tmp_path):
    target = tmp_path / "team"
    assert export.main([str(run), "--output", str(target), "--merged"]) == 0
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ids = torch.arange(5, 69)[None]
    for name in ("reasoner", "actor"):
        plain = AutoModelForCausalLM.from_pretrained(TEACHING_BASE)
        merged = AutoModelForCausalLM.from_pretrained(target / "merged" / name)
        with torch.no_grad():
            assert (merged(ids).logits - plain(ids).logits).abs().max() > 1e-3  # the adapter is in it
            adapted = PeftModel.from_pretrained(plain, str(target / name))
            torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_settings_of_generation_are_merged_as_they_are(tmp_path):
    """Of many published models transformers reads them, and refuses to write them."""
    tiny_model().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    text = json.dumps({"eos_token_id": [1, 3], "temperature": 0.6, "do_sample": False})
    (tmp_path / "base" / "generation_config.json").write_text(text, encoding="utf-8")
    base = SharedBase.load(str(tmp_path / "base"), device="cpu")
    base.add_adapter("a", LoraSpec(), seed=0)
    base.save_adapter("a", tmp_path / "a")
    write_merged(tmp_path / "merged", base.name, {"a": tmp_path / "a"})
    assert (tmp_path / "merged" / "a" / "generation_config.json").read_text(encoding="utf-8") == text


@pytest.mark.parametrize("quantised", ["by the run", "on disk"])
def test_nothing_is_merged_into_a_quantised_base(run, tmp_path, capsys, quantised):
    copy, base = tmp_path / "run", tmp_path / "base"
    shutil.copytree(run, copy)
    settings = yaml.safe_load((copy / "args.yaml").read_text())
    if quantised == "by the run":
        settings["load_in_4bit"] = True
    else:
        shutil.copytree(TEACHING_BASE, base)
        config = json.loads((base / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        (base / "config.json").write_text(json.dumps(config))
        settings["model_name_or_path"] = str(base)
    (copy / "args.yaml").write_text(yaml.safe_dump(settings))
    assert export.main([str(copy), "--output", str(tmp_path / "team"), "--merged"]) == 2
    assert "merged is on, but" in (said := capsys.readouterr().err) and "leave merged out" in said
    assert not (tmp_path / "team").exists()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "Name a run"),
        (["nowhere"], "does not exist"),
        (["RUN", "--output", "no/where"], "its folder does not exist"),
    ],
)
def test_bad_exports_get_a_sentence(run, capsys, argv, says):
    assert export.main([str(run) if word == "RUN" else word for word in argv]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_gguf_adapters_hold_the_numbers_of_their_peft_folders(tmp_path, family):
    gguf = pytest.importorskip("gguf")
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = AutoConfig.for_model(family, vocab_size=32, intermediate_size=24, head_dim=4, **shape)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "base")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False, alpha_pattern={"v_proj": 12},
                      rank_pattern={"o_proj": 2})  # fmt: skip
    adapted = get_peft_model(model, lora)
    adapted.save_pretrained(tmp_path / "peft")
    write_gguf_adapter(tmp_path / "a.gguf", tmp_path / "peft", str(tmp_path / "base"))
    read = gguf.GGUFReader(tmp_path / "a.gguf")
    told = {name: field.contents() for name, field in read.fields.items()}
    assert told["general.architecture"] == family and told["general.type"] == "adapter"
    assert told["adapter.type"] == "lora" and told["adapter.lora.alpha"] == 6.0
    parts = {tensor.name: torch.tensor(tensor.data) for tensor in read.tensors}
    assert len(parts) == 2 * 2 * len(targets)
    places = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
              "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}  # fmt: skip
    for name, module in adapted.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        layer, kind = re.search(r"layers\.(\d)\..*\.(\w+)$", name).groups()
        a, b = (parts[f"blk.{layer}.{places[kind]}.weight.lora_{part}"] for part in "ab")
        found, wanted = b @ a * 6.0 / a.shape[0], module.get_delta_weight("default")
        if family == "llama" and kind in ("q_proj", "k_proj"):
            # llama.cpp's rows of a head go in pairs: 0, half, 1, half + 1, ...
            order = [head * 4 + row for head in range(wanted.shape[0] // 4) for row in (0, 2, 1, 3)]
            wanted = wanted[order]
        torch.testing.assert_close(found, wanted.detach())


def test_an_export_for_llama_and_ollama(run, tmp_path, capsys):
    pytest.importorskip("gguf")
    target = tmp_path / "team"
    assert export.main([str(run), "--output", str(target), "--gguf", "qwen3:0.6b"]) == 0
    said = capsys.readouterr().out
    assert "--model qwen3:0.6b --lora-scaled reasoner/adapter.gguf:0,actor/adapter.gguf:0" in said
    assert (target / "actor/adapter.gguf").read_bytes()[:4] == b"GGUF"
    lines = (target / "actor/Modelfile").read_text().splitlines()
    assert lines[:3] == ["FROM qwen3:0.6b", "ADAPTER ./adapter.gguf", "PARAMETER temperature 1"]
    assert lines[3].startswith('SYSTEM """You are the Actor.')


def test_what_cannot_be_written_as_gguf_is_told_before_anything_is_written(tmp_path, run, capsys):
    pytest.importorskip("gguf")
    copy, base = tmp_path / "run", tmp_path / "base"
    shutil.copytree(run, copy)
    shutil.copytree(TEACHING_BASE, base)
    settings = yaml.safe_load((copy / "args.yaml").read_text())
    (copy / "args.yaml").write_text(yaml.safe_dump({**settings, "model_name_or_path": str(base)}))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "model_type": "gemma2"}))
    assert export.main([str(copy), "--output", str(tmp_path / "team"), "--gguf", "x.gguf"]) == 2
    assert "of the family 'gemma2'" in capsys.readouterr().err and not (tmp_path / "team").exists()


def read_as_ollama(text):
    """Commands of a Modelfile by the rules of Ollama's `ParseFile` and `unquote` (parser/parser.go)."""

    def unquoted(value):
        for mark in ('"""', '"'):
            if value.startswith(mark):
                return value[len(mark) : -len(mark)] if len(value) >= 2 * len(mark) and value.endswith(mark) else None
        return value

    commands, at = [], 0
    while at < len(text):
        if text[at] in " \t\r\n":
            at += 1
            continue
        name = re.match(r"(from|adapter|system|template|parameter [a-z0-9_]+)[ \t]", text[at:], re.IGNORECASE)
        assert name is not None, f"no command: {text[at : at + 20]!r}"
        at += name.end()
        value = ""
        while at < len(text):
            char = text[at]
            at += 1
            if char in "\r\n" and unquoted(value.strip()) is not None:
                break
            # Line breaks and blanks of an unfinished text are kept, and of the others what Go's IsPrint names.
            value += char if char in "\r\n\t" or char.isprintable() else ""
        assert unquoted(value.strip()) is not None, f"a text without its end: {value!r}"
        commands.append((name[1].lower(), unquoted(value.strip())))
    return commands


@pytest.mark.parametrize(
    "prompt",
    [
        "You solve it.",
        'Say "yes" or "no".',
        '"Quoted at both ends"',
        '""',
        'Python: """doc""" and more',
        'It ends in three """',
        '"""It begins with three',
        'one"\n"two""\nthree',
        "  blanks around, \ttabs\n\n",
        "lines\r\nof Windows\rand others",
        "{{ .System }} {braces} {{ if .Prompt }}",
        "SYSTEM x\nFROM other\n# no comment\nPARAMETER top_p 1",
        "back\\slash \\n 'single' `tick` $HOME",
        "\u4f60\u597d \u00e9 \U0001f600 \u2014",
        "",
    ],
)
@pytest.mark.parametrize("base", ["qwen3:0.6b", "/a folder/base \u00e9.gguf", "hf.co/a/b:Q4_K_M", "it's"])
def test_ollama_reads_from_a_modelfile_what_was_written(prompt, base):
    agent = AgentSpec("a", prompt=prompt)
    check_modelfile([agent], base)
    expected = [("from", base), ("adapter", "./adapter.gguf"), ("parameter temperature", "0.25")]
    assert read_as_ollama(modelfile(agent, base, 0.25)) == expected + ([("system", prompt)] if prompt else [])


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ('Write """\nand go on', "three double quotes"),
        ('Write """ \t\r\nand go on', "three double quotes"),
        ("R\u00e9ponds\u00a0: oui", r"U\+00A0"),
        ("\U0001f468\u200d\U0001f469", r"U\+200D"),
        ("\u0645\u06cc\u200c\u062e", r"U\+200C"),
        ("\ufeffYou", r"U\+FEFF"),
        ("a\x0cb", r"U\+000C"),
        ("a\u2028b", r"U\+2028"),
        ("a\u3000b", r"U\+3000"),
    ],
)
def test_a_role_prompt_that_ollama_would_read_as_another_is_refused(prompt, words):
    agent = AgentSpec("a", prompt=prompt)
    with pytest.raises(ConfigError, match=words):
        check_modelfile([agent], "x")
    # The independent reader finds another prompt, or none, so that the refusal is needed.
    try:
        assert ("system", prompt) not in read_as_ollama(modelfile(agent, "x", 1.0))
    except AssertionError as error:
        assert "no command" in str(error) or "without its end" in str(error)


@pytest.mark.parametrize("base", ["", " x", "x ", '"x"', "x\nSYSTEM y", "a\u00a0b", "\t"])
def test_a_name_of_a_base_that_no_modelfile_holds_is_refused(base):
    with pytest.raises(ConfigError, match="expected the name of the base"):
        check_modelfile([], base)


def test_an_export_names_a_base_that_is_a_file_by_its_place(run, tmp_path, monkeypatch, capsys):
    pytest.importorskip("gguf")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.gguf").write_bytes(b"GGUF")
    assert export.main([str(run), "--output", "team", "--gguf", "base.gguf"]) == 0
    # Ollama takes a path from the Modelfile's folder on; llama-server is to be called in the export's.
    assert (tmp_path / "team/actor/Modelfile").read_text().splitlines()[0] == f"FROM {tmp_path / 'base.gguf'}"
    assert f"--model {tmp_path / 'base.gguf'} " in capsys.readouterr().out


def test_intervals():
    assert interval([0.5]) is None
    low, high = interval([1.0] * 20)
    assert (round(low, 3), high) == (0.839, 1.0)  # Wilson: 20 / (20 + 1.96 ** 2)
    low, high = interval([0.25, 0.75])
    # Deviation .25 * sqrt(2); standard error .25; 1.96 of them to both sides of .5.
    assert (low, high) == (pytest.approx(0.01), pytest.approx(0.99))


# ------------------------------------------------------------------------------------------------------------- collect


def collected(run, tmp_path, *flags):
    target = tmp_path / "chat.jsonl"
    code = collect.main([str(run), "--output", str(target), "--overwrite", *flags])
    return code, [json.loads(line) for line in target.read_text().splitlines()] if target.exists() else []


def test_collect_takes_turns_by_score_agent_and_reward(run, tmp_path, capsys):
    code, rows = collected(run, tmp_path, "--min_score", "0", "--kind", "all")
    assert code == 0
    roles = [message["role"] for message in rows[0]["messages"]]
    assert roles == ["system", "user", "assistant"] and {row["agent"] for row in rows} == {"reasoner", "actor"}
    assert len({json.dumps(row["messages"]) for row in rows}) == len(rows)
    _, own = collected(run, tmp_path, "--min_score", "0", "--kind", "all", "--agent", "actor")
    assert own == [row for row in rows if row["agent"] == "actor"]
    _, pairs = collected(run, tmp_path, "--min_score", "0", "--kind", "all", "--layout", "prompt_completion")
    assert [row["prompt"] + row["completion"] for row in pairs] == [row["messages"] for row in rows]
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "args.yaml").write_text("seed: 1\n")
    for folder, flags, says in (
        (run, ["--min_score", "7"], "no turn passes the filters; lower --min_score (7)"),
        (run, ["--agent", "aktor"], "did you mean 'actor'"),
        (tmp_path / "empty", [], "is no run folder"),
        (tmp_path / "begun", [], "no episodes are recorded in"),
    ):
        code, _ = collected(folder, tmp_path, *flags)
        assert code == 2 and says in capsys.readouterr().err


def test_collect_replaces_no_file(run, tmp_path, capsys):
    (tmp_path / "mine.jsonl").write_text("precious")
    assert collect.main([str(run), "--output", str(tmp_path / "mine.jsonl")]) == 2
    assert "exists" in capsys.readouterr().err and (tmp_path / "mine.jsonl").read_text() == "precious"


def test_the_turns_of_a_run_are_a_data_set(run, tmp_path, capsys, monkeypatch):
    from datasets import load_from_disk

    folder = tmp_path / "turns"
    asked = [str(run), "--layout", "turns", "--kind", "all", "--dataset", "--output", str(folder)]
    assert collect.main(asked) == 0
    rows, problems = load_from_disk(str(folder)), []
    turns = [turn for episode in read_episodes(run, problems) for turn in episode.turns]
    assert [row["answer"] for row in rows] == [turn["text"] for turn in turns] and not problems
    assert [row["reward"] for row in rows] == [turn["reward"] for turn in turns]
    assert {row["kind"] for row in rows} > {"train"} and {row["prompt"][-1]["role"] for row in rows} == {"user"}
    assert all(row["agent"] and row["score"] is not None for row in rows)
    # The same as lines, and of one agent.
    assert collect.main([*asked[:5], "--output", str(tmp_path / "turns.jsonl")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text().splitlines()]
    assert lines == rows.to_list()
    assert collect.main(asked) == 2 and "exists" in capsys.readouterr().err
    assert collect.main([*asked, "--overwrite", "--agent", rows[0]["agent"]]) == 0
    assert {row["agent"] for row in load_from_disk(str(folder))} == {rows[0]["agent"]}
    (tmp_path / "mine").mkdir()
    assert collect.main([*asked[:-1], str(tmp_path / "mine"), "--overwrite"]) == 2
    assert "no data set" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert collect.main([*asked[:-1], str(tmp_path / "new")]) == 2
    assert "writing a data set needs a package" in capsys.readouterr().err


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["messages", "prompt_completion"])
def test_trl_trains_on_a_collected_file(run, tmp_path, layout):
    collected(run, tmp_path, "--min_score", "0", "--kind", "all", "--layout", layout)
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    data = load_dataset(
        "json", data_files=str(tmp_path / "chat.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
    )
    model = AutoModelForCausalLM.from_pretrained(TEACHING_BASE, dtype=torch.float32)
    config = SFTConfig(
        output_dir=str(tmp_path / "sft"),
        max_steps=8,
        learning_rate=1e-4,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    tokenizer = AutoTokenizer.from_pretrained(TEACHING_BASE)
    trainer = SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer)
    before = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    trainer.train()
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] < before


# ------------------------------------------------------------------------------------------------------------ the hub


class Hub:
    """A stand-in for the Hugging Face Hub: who is logged in, repositories, and commits with their files."""

    def __init__(self, token="hf_own", status=None):
        self.token, self.status = token, status
        self.repositories, self.files, self.asked = {}, {}, []
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def answer(self, body, status=200):
                text = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def do_GET(self):
                hub.asked.append(self.path)
                if self.headers.get("Authorization") != f"Bearer {hub.token}":
                    return self.answer({"error": "Invalid credentials"}, 401)
                if hub.status is not None and "whoami" not in self.path:
                    return self.answer({"error": "refused"}, hub.status)
                if "whoami" in self.path:
                    return self.answer({"name": "someone", "type": "user", "orgs": [], "auth": {}})
                return self.answer({"error": "none"}, 404)

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                hub.asked.append(self.path)
                if self.headers.get("Authorization") != f"Bearer {hub.token}":
                    return self.answer({"error": "Invalid credentials"}, 401)
                if hub.status is not None:
                    return self.answer({"error": "refused"}, hub.status)
                if self.path == "/api/repos/create":
                    made = json.loads(body)
                    hub.repositories[f"{made.get('organization', 'someone')}/{made['name']}"] = made
                    return self.answer({"url": f"http://{self.headers['Host']}/someone/{made['name']}"})
                if "/preupload/" in self.path:
                    files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                             for f in json.loads(body)["files"]]  # fmt: skip
                    return self.answer({"files": files})
                if "/commit/" in self.path:
                    for line in body.decode().splitlines():
                        if (said := json.loads(line))["key"] == "file":
                            hub.files[said["value"]["path"]] = base64.b64decode(said["value"]["content"])
                    return self.answer(
                        {
                            "commitUrl": f"http://{self.headers['Host']}/someone/x/commit/{'0' * 40}",
                            "commitOid": "0" * 40,
                            "success": True,
                        }
                    )
                return self.answer({"valid": True})

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def hub(monkeypatch):
    made = []

    def start(**given):
        hub = Hub(**given)
        made.append(hub)
        address = f"http://127.0.0.1:{hub.server.server_address[1]}"
        monkeypatch.setattr(exported_hub, "_api", lambda: HfApi(endpoint=address, token="hf_own"))
        return hub

    yield start
    for hub in made:
        hub.server.shutdown()


def test_an_export_is_uploaded_as_it_lies_on_disk(run, tmp_path, hub, capsys):
    place, target = hub(), tmp_path / "team"
    assert export.main([str(run), "--output", str(target), "--push_to_hub", "someone/my-team"]) == 0
    made = place.repositories["someone/my-team"]
    assert made.get("private") is True or made.get("visibility") == "private"
    there = {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}
    assert place.files == there and "actor/adapter_model.safetensors" in there
    card = there["README.md"].decode()
    header = yaml.safe_load(card.split("---")[1])
    assert header["pipeline_tag"] == "text-generation" and {"mafrt", "multi-agent"} <= set(header["tags"])
    assert "actor=./actor" in card and str(tmp_path) not in card
    assert "Uploaded to " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "given", "said"),
    [
        (["--push_to_hub", "my team"], {}, "USER/NAME"),
        (["--push_to_hub", "my-team"], {}, "USER/NAME"),
        (["--push_to_hub", "a/b/c"], {}, "USER/NAME"),
        (["--push_to_hub", "../x"], {}, "USER/NAME"),
        (["--public"], {}, "--push_to_hub"),
        (["--push_to_hub", "someone/x"], {"token": "another"}, "HF_TOKEN"),
    ],
)
def test_what_cannot_be_uploaded_is_told_before_anything_is_written(run, tmp_path, hub, capsys, words, given, said):
    hub(**given)
    target = tmp_path / "team"
    assert export.main([str(run), "--output", str(target), *words]) == 2
    told = capsys.readouterr().err
    assert said in told and "Traceback" not in told and "hf_own" not in told and not target.exists()


@pytest.mark.parametrize("status", [403, 500])
def test_a_hub_that_refuses_leaves_the_export(run, tmp_path, hub, capsys, status):
    hub(status=status)
    target = tmp_path / "team"
    assert export.main([str(run), "--output", str(target), "--push_to_hub", "someone/x"]) == 2
    told = capsys.readouterr().err
    assert str(status) in told and len(told.strip().splitlines()) == 1 and (target / "actor").is_dir()
