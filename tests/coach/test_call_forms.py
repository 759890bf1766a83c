"""Tool calls in the forms of every model family: right ones are read, wrong ones say why, mentions are words."""

# ruff: noqa: E501 (a form stands on one line)
from __future__ import annotations

import json
import re
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from mafrt.config.agent import AgentSpec
from mafrt.config.team import Team
from mafrt.environment.bare_calls import with_types
from mafrt.environment.session import Session
from mafrt.environment.tool_calls import BadCall, ToolCall, find_call, find_calls, find_code, split_calls, visible
from mafrt.envs.math import MathEnv, Task

A = {"expression": "3 + 4"}
J = json.dumps({"name": "calculator", "arguments": A})
P = json.dumps({"name": "calculator", "parameters": A})
a = json.dumps(A)
K3 = (
    '<|open|>call tool="calculator" index="1"<|sep|><|open|>argument key="expression" type="string"<|sep|>3 + 4'
    "<|close|>argument<|sep|><|close|>call<|sep|>"
)
M3 = "]<]minimax[>["
RIGHT = {
    "hermes": f"<tool_call>\n{J}\n</tool_call>",
    "qwen xml": "<tool_call>\n<function=calculator>\n<parameter=expression>\n3 + 4\n</parameter>\n</function>\n</tool_call>",
    "qwen xml no tool_call": "<function=calculator>\n<parameter=expression>\n3 + 4\n</parameter>\n</function>",
    "qwen xml no function end": "<tool_call>\n<function=calculator>\n<parameter=expression>\n3 + 4\n</parameter>\n</tool_call>",
    "llama3 json": P,
    "llama3 tag": f"<|python_tag|>{P}",
    "llama3 tag eom": f"<|python_tag|>{P}<|eom_id|>",
    "llama builtin": '<|python_tag|>calculator.call(expression="3 + 4")',
    "llama31 custom": f"<function=calculator>{a}</function>",
    "llama4 pythonic": '[calculator(expression="3 + 4")]',
    "llama4 start": '<|python_start|>[calculator(expression="3 + 4")]<|python_end|>',
    "mistral old": f"[TOOL_CALLS][{J}]",
    "mistral old sp": f"[TOOL_CALLS] [{J}]",
    "mistral new": f"[TOOL_CALLS]calculator{a}",
    "mistral args": f"[TOOL_CALLS]calculator[ARGS]{a}",
    "mistral callid": f"[TOOL_CALLS]calculator[CALL_ID]abc123def[ARGS]{a}",
    "ds v3": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n{a}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "ds v3 eos": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n{a}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    "ds v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>calculator<｜tool▁sep｜>{a}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "ds v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="calculator">\n<｜DSML｜parameter name="expression" string="true">3 + 4</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "ds v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="calculator">\n<｜DSML｜parameter name="expression" string="true">3 + 4</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "glm": "<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>3 + 4</arg_value>\n</tool_call>",
    "glm47": "<tool_call>calculator<arg_key>expression</arg_key><arg_value>3 + 4</arg_value></tool_call>",
    "kimi": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.calculator:0<|tool_call_argument_begin|>{a}<|tool_call_end|><|tool_calls_section_end|>",
    "kimi no section": f"<|tool_call_begin|>functions.calculator:0<|tool_call_argument_begin|>{a}<|tool_call_end|>",
    "kimi without special tokens": f"functions.calculator:0{a}",
    "kimi section": f"<|tool_call_section_begin|><|tool_call_begin|>functions.calculator:0<|tool_call_argument_begin|>{a}<|tool_call_end|><|tool_call_section_end|>",
    "kimi3": f"<|open|>tools<|sep|>{K3}<|close|>tools<|sep|><|close|>message<|sep|>",
    "kimi3 no section": K3,
    "kimi3 whole": f"<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>So.<|close|>response<|sep|><|open|>tools<|sep|>{K3}<|close|>tools<|sep|>",
    "kimi3 cut": f"<|open|>tools<|sep|>{K3}",
    "minimax m1": f"<tool_calls>\n{J}\n</tool_calls>",
    "minimax m3": f'{M3}<tool_call>\n{M3}<invoke name="calculator">{M3}<expression>3 + 4{M3}</expression>{M3}</invoke>\n{M3}</tool_call>',
    "minimax m3 without special tokens": '<tool_call>\n<invoke name="calculator"><expression>3 + 4</expression></invoke>\n</tool_call>',
    "solar": f"<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>calculator<|tool_call:args|>{a}<|tool_call:end|><|calls|>",
    "solar whole": f"<|think|>hm<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>calculator<|tool_call:args|>{a}<|tool_call:end|><|calls|>",
    "muse": ' to=self<|message|>hm<|eom|><|start|>assistant to=calculator<|message|><atem:function_calls>\n<atem:invoke name="calculator">\n<atem:parameter name="expression">3 + 4</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>',
    "minicpm5": '<function name="calculator"><param name="expression"><![CDATA[3 + 4]]></param></function>',
    "minimax m2": '<minimax:tool_call>\n<invoke name="calculator">\n<parameter name="expression">3 + 4</parameter>\n</invoke>\n</minimax:tool_call>',
    "harmony": f"<|channel|>commentary to=functions.calculator <|constrain|>json<|message|>{a}<|call|>",
    "harmony2": f"<|channel|>analysis<|message|>need a tool<|end|><|start|>assistant<|channel|>commentary to=functions.calculator <|constrain|>json<|message|>{a}<|call|>",
    "harmony3": f"<|start|>assistant to=functions.calculator<|channel|>commentary json<|message|>{a}<|call|>",
    "harmony code": f"<|channel|>commentary to=functions.calculator code<|message|>{a}<|call|>",
    "harmony bare": f"commentary to=functions.calculator json{a}",
    "harmony bare assistant": f"assistantcommentary to=functions.calculator json{a}",
    "harmony bare thought": f"analysisNeed a tool.assistantcommentary to=functions.calculator json{a}",
    "harmony bare role": f"analysisNeed.assistant to=functions.calculatorcommentary json{a}",
    "harmony bare code": f"commentary to=functions.calculator code{a}",
    "harmony bare leak": f" to=functions.calculator json\n{a}",
    "gemma3": '```tool_code\ncalculator(expression="3 + 4")\n```',
    "gemma3 print": '```tool_code\nprint(calculator(expression="3 + 4"))\n```',
    "gemma3 api": '```tool_code\nprint(default_api.calculator(expression="3 + 4"))\n```',
    "gemma4": '<|tool_call>call:calculator{expression:<|"|>3 + 4<|"|>}<tool_call|>',
    "functiongemma": "<start_function_call>call:calculator{expression:<escape>3 + 4<escape>}<end_function_call>",
    "granite3": f"<|tool_call|>[{J}]",
    "granite4": f"<tool_call>\n{J}\n</tool_call>",
    "granite20b": f"<function_call> {J}",
    "phi4": f"functools[{J}]",
    "phi4mm": f"<|tool_call|>[{J}]<|/tool_call|>",
    "cohere": '<|START_THINKING|>I will.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "calculator", "parameters": {"expression": "3 + 4"}}\n]<|END_ACTION|>',
    "cohere old": 'Action: ```json\n[\n    {\n        "tool_name": "calculator",\n        "parameters": {"expression": "3 + 4"}\n    }\n]```',
    "functionary32": f">>>calculator\n{a}",
    "functionary32 all": f">>>all\nLet me see.\n>>>calculator\n{a}",
    "functionary2": f"<|from|>assistant\n<|recipient|>calculator\n<|content|>{a}<|stop|>",
    "functionary31": f"<function=calculator>{a}</function>",
    "xlam": f"[{J}]",
    "xlam fence": f"```json\n[{J}]\n```",
    "xlam think": f"<think>hm</think>[{J}]",
    "olmo3": '<function_calls>\ncalculator(expression="3 + 4")\n</function_calls>',
    "ernie": f"<think>\nx\n</think>\n\n<tool_call>\n{J}\n</tool_call>\n",
    "nemotron": f"<TOOLCALL>[{J}]</TOOLCALL>",
    "nemotron3": "<tool_call>\n<function=calculator>\n<parameter=expression>\n3 + 4\n</parameter>\n</function>\n</tool_call>\n",
    "hunyuan": f"<tool_calls>[{J}]</tool_calls>",
    "hy3": "<tool_calls><tool_call>calculator<tool_sep><arg_key>expression</arg_key><arg_value>3 + 4</arg_value></tool_call></tool_calls>",
    "jamba": f"<tool_calls>[\n{J}\n]</tool_calls>",
    "lfm2": '<|tool_call_start|>[calculator(expression="3 + 4")]<|tool_call_end|>',
    "longcat": f"<longcat_tool_call>{J}</longcat_tool_call>",
    "seed": "<seed:tool_call>\n<function=calculator>\n<parameter=expression>3 + 4</parameter>\n</function>\n</seed:tool_call>",
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="calculator"><steptml:parameter name="expression">3 + 4</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
    "internlm": f"<|action_start|><|plugin|>{P}<|action_end|>",
    "apertus": '<|tools_prefix|>[{"calculator": {"expression": "3 + 4"}}]<|tools_suffix|>',
    "gigachat": f"<|function_call|>{J}",
    "dots": '<dots_function_call>\n<invoke name="calculator">\n<parameter name="expression">3 + 4</parameter>\n</invoke>\n</dots_function_call>',
    "claude": '<function_calls>\n<invoke name="calculator">\n<parameter name="expression">3 + 4</parameter>\n</invoke>\n</function_calls>',
    "minicpm": '<function name="calculator"><param name="expression">3 + 4</param></function>',
    "smollm3 xml": f"<tool_call>{J}</tool_call>",
    "args str": "<tool_call>" + json.dumps({"name": "calculator", "arguments": a}) + "</tool_call>",
    "args key": "<tool_call>" + json.dumps({"name": "calculator", "args": A}) + "</tool_call>",
    "input key": "<tool_call>" + json.dumps({"name": "calculator", "input": A}) + "</tool_call>",
    "nested": "<tool_call>"
    + json.dumps({"type": "function", "id": "c", "function": {"name": "calculator", "arguments": A}})
    + "</tool_call>",
    "nested str": json.dumps({"type": "function", "function": {"name": "calculator", "arguments": a}}),
    "tool_calls obj": json.dumps(
        {"tool_calls": [{"type": "function", "function": {"name": "calculator", "arguments": a}}]}
    ),
    "py dict": "<tool_call>{'name': 'calculator', 'arguments': {'expression': '3 + 4'}}</tool_call>",
    "trailing comma": '<tool_call>{"name": "calculator", "arguments": {"expression": "3 + 4",},}</tool_call>',
    "fence tags": f"```\n<tool_call>\n{J}\n</tool_call>\n```",
    "fence xml": f"```xml\n<tool_call>\n{J}\n</tool_call>\n```",
    "fence plain": f"```\n{J}\n```",
    "fence at the end": f"```json\n{J}```",
    "function_call": json.dumps({"function_call": {"name": "calculator", "arguments": a}}),
    "react": f"Thought: compute\nAction: calculator\nAction Input: {a}",
    "tag with an id": f'<tool_call id="1">{J}</tool_call>',
    "midline": f"I call {J} now.",
    "unclosed": f"<tool_call>\n{J}",
    "pretty": "<tool_call>\n" + json.dumps({"name": "calculator", "arguments": A}, indent=2) + "\n</tool_call>",
    "func name str": "<tool_call>" + json.dumps({"function": "calculator", "arguments": A}) + "</tool_call>",
    "whole inline": f"`<tool_call>{J}</tool_call>`",
    "react json": '```json\n{"action": "calculator", "action_input": {"expression": "3 + 4"}}\n```',
    "after thought": f"thinking of <tool_call>{{}}</tool_call></think>\n<tool_call>{J}</tool_call>",
    "reasoning qwen3.5": "<think>\nplan\n</think>\n\n<tool_call>\n<function=calculator>\n<parameter=expression>\n3 + 4\n</parameter>\n</function>\n</tool_call>",
}
TWO = {
    "kimi3": f"<|open|>tools<|sep|>{K3}{K3}<|close|>tools<|sep|>",
    "kimi bare": f"functions.calculator:0{a}functions.calculator:1{a}",
    "harmony bare": f"commentary to=functions.calculator json{a}assistantcommentary to=functions.calculator json{a}",
    "one tag": f"<tool_call>{J}\n{J}</tool_call>",
    "list": f"<tool_call>[{J},{J}]</tool_call>",
    "two": f"<tool_call>{J}</tool_call><tool_call>{J}</tool_call>",
    "m1": f"<tool_calls>\n{J}\n{J}\n</tool_calls>",
    "llama": f"<|python_tag|>{P}; {P}",
    "llama bare": f"{P}; {P}",
    "mist": f"[TOOL_CALLS]calculator{a}[TOOL_CALLS]calculator{a}",
    "mist args": f"[TOOL_CALLS]calculator[ARGS]{a}[TOOL_CALLS]calculator[ARGS]{a}",
    "dsv31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>calculator<｜tool▁sep｜>{a}<｜tool▁call▁end｜><｜tool▁call▁begin｜>calculator<｜tool▁sep｜>{a}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "dsv3": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n{a}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n{a}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "glm": "<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>3 + 4</arg_value>\n</tool_call>\n" * 2,
    "kimi": "<|tool_calls_section_begin|>"
    + f"<|tool_call_begin|>functions.calculator:0<|tool_call_argument_begin|>{a}<|tool_call_end|>" * 2
    + "<|tool_calls_section_end|>",
    "qwenxml two in one": "<tool_call>\n"
    + "<function=calculator>\n<parameter=expression>\n3 + 4\n</parameter>\n</function>\n" * 2
    + "</tool_call>",
    "olmo": '<function_calls>\ncalculator(expression="3 + 4")\ncalculator(expression="3 + 4")\n</function_calls>',
    "llama4": '[calculator(expression="3 + 4"), calculator(expression="3 + 4")]',
    "m2": "<minimax:tool_call>"
    + '<invoke name="calculator"><parameter name="expression">3 + 4</parameter></invoke>\n' * 2
    + "</minimax:tool_call>",
    "gemma4": '<|tool_call>call:calculator{expression:<|"|>3 + 4<|"|>}<tool_call|>' * 2,
    "harmony": f"<|channel|>commentary to=functions.calculator <|constrain|>json<|message|>{a}<|call|><|start|>assistant<|channel|>commentary to=functions.calculator <|constrain|>json<|message|>{a}<|call|>",
    "functionary": f">>>calculator\n{a}\n>>>calculator\n{a}",
    "fences": f"```json\n{J}\n```\n```json\n{J}\n```",
    "one fence": f"```json\n{J}\n{J}\n```",
    "bare lines": f"{J}\n{J}",
    "hy3": "<tool_calls>"
    + "<tool_call>calculator<tool_sep><arg_key>expression</arg_key><arg_value>3 + 4</arg_value></tool_call>" * 2
    + "</tool_calls>",
    "granite20": f"<function_call> {J} <function_call> {J}",
    "func31": f"<function=calculator>{a}</function>" * 2,
    "missing close first": f"<tool_call>{J}\n<tool_call>{J}</tool_call>",
}
WORDS = {
    "kimi3": r"The mark <|open|>call<|sep|> opens a call. \boxed{7}",
    "kimi3 bare": r"A call tool=x, and an argument key=y. \boxed{7}",
    "kimi3 name": r"The attribute call tool=\"f\" names the tool. \boxed{7}",
    "harmony python": r"The path leads to=python of the analysis. \boxed{7}",
    "name and braces": r"The set S{\"a\"} holds a. \boxed{7}",
    "result": 'Result\n{"a": 1}',
    "harmony bare": r"The commentary goes to=functions.add of the channel. \boxed{7}",
    "functions": r"I call functions.add:0 first. \boxed{7}",
    "think": r"I use the <think> tag to think. \boxed{7}",
    "assistant": r"The assistantfinal mark and the assistant commentary. \boxed{7}",
    "q": r"Use '<tool_call>' tags. \boxed{7}",
    "prose": r"The tags <tool_call> and </tool_call> enclose calls. \boxed{7}",
    "start": r"<tool_call> is a tag that I do not need. \boxed{7}",
    "cot": r"I think [TOOL_CALLS] is Mistral's mark. \boxed{7}",
    "module": r"The mark functools is a module. \boxed{7}",
    "xml": r"In <function=name> one writes a name. \boxed{7}",
    "json": '{"name": "Ada", "age": 36}',
    "schema": '{"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}',
    "latex": r"\boxed{7} {\"x\"} [1, {2}]",
    "prog": "```js\nf('<tool_call>')\n```",
    "inline": "`<tool_call>{}</tool_call>` is the form",
    "list": "[f(3), g(4)]",
    "quoted2": 'He wrote "<think>" and left. \\boxed{7}',
    "kimi": r"The token <|tool_call_begin|> begins. \boxed{7}",
    "arg": r"GLM writes <arg_key>. \boxed{7}",
    "nested json": 'The result is {"x": {"name": "a", "arguments": {}}}. \\boxed{7}',
}
WRONG = {
    "kimi3": '<|open|>tools<|sep|><|open|>call tool="f"<|sep|><|open|>argument key="x"<|sep|>1<|close|>tools<|sep|>',
    "kimi3 twice": '<|open|>call tool="f"<|sep|>'
    + '<|open|>argument key="x"<|sep|>1<|close|>argument<|sep|>' * 2
    + "<|close|>call<|sep|>",
    "kimi bare": 'functions.f:0{"a": }',
    "kimi3 bare": 'toolscall tool="f" index="1"argument key="x" type="string"1',
    "kimi3 bare twice": 'call tool="f"' + 'argument key="x" type="number"1argument' * 2 + "call",
    "mistral bare": 'f{"a": }',
    "gemma bare": "call:f{a:some words}",
    "harmony bare empty": "commentary to=functions.f json",
    "harmony bare words": "commentary to=functions.f code print(3)",
    "ds v3 bare": 'functionf\n```json\n{"a": }\n```',
    "harmony bare": 'commentary to=functions.f json{"a": }',
    "broken": '<tool_call>{"name": "a", "arguments": {"x": }}</tool_call>',
    "extra brace": '<tool_call>{"name": "a", "arguments": {}}}</tool_call>',
    "bare broken": '{"name": "calculator", "arguments": {"expression": "3}}',
    "flat": '<tool_call>{"name": "calculator", "expression": "3+4"}</tool_call>',
    "argstr": '<tool_call>{"name": "calculator", "arguments": "3+4"}</tool_call>',
    "arglist": '<tool_call>{"name": "calculator", "arguments": [1]}</tool_call>',
    "noname": '<tool_call>{"arguments": {"a": 1}}</tool_call>',
    "xml unclosed": "<tool_call>\n<function=calculator>\n<parameter=expression>\n3 + 4\n</tool_call>",
    "words": "<tool_call>search for pens</tool_call>",
    "empty": "<tool_call></tool_call>",
    "mist": '[TOOL_CALLS]calculator{"a": }',
    "mist2": '[TOOL_CALLS]calculator[ARGS]{"a": 1',
    "harm": "<|channel|>commentary to=functions.f<|message|>hello<|call|>",
    "kimi": '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a":<|tool_call_end|>',
    "glm": "<tool_call>f\n<arg_key>x</arg_key>\n</tool_call>",
    "twice": "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
    "fence": '```json\n{"name": "calculator", "arguments": {"expression": 3 +}}\n```',
    "unc fence": '```json\n{"name": "calculator", "arguments": {"expression": "3"}}',
    "positional": "<function_calls>f(3)</function_calls>",
    "NaN": '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
    "func": 'functools[{"name": "a", "arguments": {]',
    "dsv3 bad": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": \n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "gemma4": '<|tool_call>call:f{a:<|"|>x}<tool_call|>',
    "two args": '<tool_call>{"name":"a","arguments":{"x":1},"parameters":{"y":2}}</tool_call>',
    "tool_code": "```tool_code\nx = 1\n```",
    "python tag": '<|python_tag|>{"name": "a", "parameters": {"x": ',
    "fcall cut": "<tool_call>\n",
    "dsml": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n',
}


@pytest.mark.parametrize("form", RIGHT)
def test_a_call_is_read_in_every_familys_form(form):
    assert find_calls(RIGHT[form]) == [ToolCall("calculator", A)]
    assert find_calls(f"I will compute.\n\n{RIGHT[form]}")[-1:] == [ToolCall("calculator", A)] or form in (
        "llama4 pythonic",
        "whole inline",
    )
    assert find_call(RIGHT[form]) == ToolCall("calculator", A)


@pytest.mark.parametrize("form", TWO)
def test_two_calls_are_two(form):
    assert find_calls(TWO[form]) == [ToolCall("calculator", A)] * 2


TOOLS = {"calculator": {"type": "object", "properties": {"expression": {"type": "string"}}}}
SPECIAL = re.compile(
    r"<\|[^<>]*?\|?>|<\w+\|>|<｜[^｜]*｜>|\[TOOL_CALLS\]|\[CALL_ID\]|\[ARGS\]|<(?:start|end)_function_call>|<escape>"
)
TAG = re.compile(
    SPECIAL.pattern + r"|</?[\w:.-]*(?:tool_call|function_call|arg_key|arg_value|tool_sep|TOOLCALL)[\w:.-]*>"
)
"""Of the forms with tags too, as if their vocabularies had them as special tokens."""
DROPPED = {
    f"{name} {number}": (SPECIAL.sub("", text), number)
    for number, forms in ((1, RIGHT), (2, TWO))
    for name, text in forms.items()
    if SPECIAL.search(text)
}


@pytest.mark.parametrize("form", DROPPED)
def test_a_call_whose_special_tokens_were_dropped_in_decoding_is_read_or_reported(form):
    text, number = DROPPED[form]
    if "call:calculator" in text:  # nothing tells where a text ends
        assert [type(call) for call in find_calls(text, tools=TOOLS)] == [BadCall]
    else:
        assert find_calls(text, tools=TOOLS) == [ToolCall("calculator", A)] * number


@pytest.mark.parametrize("form", [name for name in {**TWO, **RIGHT} if TAG.search({**TWO, **RIGHT}[name])])
def test_no_call_is_lost_in_silence_whatever_marks_are_dropped(form):
    for number, text in ((1, RIGHT.get(form)), (2, TWO.get(form))):
        for dropped in (TAG, *(re.compile(re.escape(mark)) for mark in {m[0] for m in TAG.finditer(text or "")})):
            if text is None or dropped.pattern == r"<\|close\|>" or form.startswith(("fence", "after thought")):
                continue  # then a thought does not end, or a block of code is one
            calls = find_calls(dropped.sub("", text), tools=TOOLS)
            assert calls == [ToolCall("calculator", A)] * number or {type(call) for call in calls} == {BadCall}


LOST = {
    "apertus in words": 'I will compute.\n\n[{"calculator": {"expression": "3 + 4"}}]',
    "apertus twice": '[{"calculator": {"expression": "3 + 4"}}, {"calculator": {"expression": "3 + 4"}}]',
    "apertus cut": '[{"calculator": {"expression": "3 + 4"',
    "apertus with another tool": '[{"calculator": {"expression": "3 + 4"}}, 5]',
    "mistral id": 'calculatorAb3dEf9hI{"expression": "3 + 4"}',
    "mistral ids": 'calculator[CALL_ID]abc123def[ARGS]{"expression": "3 + 4"}',
    "mistral id cut": 'calculator[CALL_ID]abc123def[ARGS]{"expression": "3 +',
    "glm in words": "Now.\ncalculatorexpression3 + 4",
    "glm lines": "calculator\nexpression\n3 + 4\n",
    "half glm": "calculator<arg_key>expression</arg_key><arg_value>3 + 4</arg_value>",
    "olmo": 'calculator(expression="3 + 4")',
    "gemma": "call:calculator{expression:3 + 4}",
    "tail": 'It is {"expression": "3 + 4"}</tool_call>',
    "kimi tail": 'calculator<|tool_call_argument_begin|>{"expression": "3 + 4"}<|tool_call_end|>',
    "deepseek": 'calculator\n```json\n{"expression": "3 + 4"}\n```</｜DSML｜tool_calls>',
}


@pytest.mark.parametrize("lost", LOST)
def test_a_call_that_lost_its_marks_is_read_by_the_tools_that_there_are(lost):
    calls = find_calls(LOST[lost], tools=TOOLS)
    assert calls
    for call in calls:
        assert call == ToolCall("calculator", A) if isinstance(call, ToolCall) else call.why.startswith("Nothing was")


OTHERS = {
    "MCP": json.dumps({"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "calculator", "arguments": A}}),
    "Gemini": json.dumps({"functionCall": {"name": "calculator", "args": A}}),
    "Gemini's parts": json.dumps({"parts": [{"function_call": {"name": "calculator", "args": A}}]}),
    "one of tool_calls": json.dumps({"tool_calls": {"name": "calculator", "arguments": A}}),
    "a tag with a name": f'<tool name="calculator">{a}</tool>',
    "a tag of the tool": f"<calculator>{a}</calculator>",
    "Cline": "<calculator>\n<expression>3 + 4</expression>\n</calculator>",
    "Cline's MCP": f"<use_mcp_tool>\n<tool_name>calculator</tool_name>\n<arguments>\n{a}\n</arguments>\n</use_mcp_tool>",
    "no closing tag": 'So.\n<invoke name="calculator" expression="3 + 4"/>',
    "ReAct": "Thought: I compute.\nAction: calculator[3 + 4]",
    "ReAct, Python": 'Action: calculator(expression="3 + 4")',
    "ReAct, small letters": f"action: calculator\naction input: {a}",
    "ReAct, bold": f"**Action:** calculator\n**Action Input:** {a}",
    "Qwen-Agent": f"\u273fFUNCTION\u273f: calculator\n\u273fARGS\u273f: {a}",
    "no names": '[calculator("3 + 4")]',
}


@pytest.mark.parametrize("form", OTHERS)
def test_a_call_in_a_form_of_another_program_is_read_or_reported(form):
    [call] = find_calls(OTHERS[form], tools=TOOLS)
    assert call == ToolCall("calculator", A) if isinstance(call, ToolCall) else call.why.startswith("Nothing was")


@pytest.mark.parametrize("words", [*WORDS.values(), "The calculator is a tool.", "The tool: a calculator",
    '{"tool": "calculator", "answer": 7}', 'As `{"name": "calculator"}` says.', "My action: calculator first, then words.", "calculator", '[{"a": {"x": 1}}]',
    "The tags `<tool_call>` and `</tool_call>`\nenclose calls.", "calculator: I used it.", "I need calculator(3)."])  # fmt: skip
def test_words_stay_words_where_there_are_tools(words):
    assert find_calls(words, tools=TOOLS) == []


@pytest.mark.parametrize(
    "head",
    ["analysis to=python code", "assistantanalysis to=python code", "analysisSo.assistantanalysis to=python code",
     "commentary to=python code", "assistant to=pythonanalysis code", "analysis to=python", " to=pythonanalysis code",
     "<|channel|>analysis to=python code<|message|>", "<|start|>assistant<|channel|>analysis to=python <|message|>"],
)  # fmt: skip
def test_a_program_of_harmonys_python_is_read_with_special_tokens_or_without(head):
    code = "import math\nx = {'a': 1}\nprint(math.pi)"
    assert find_calls(head + code) == [ToolCall("python", {"code": code})]
    assert find_code(head + code) == code


@pytest.mark.parametrize("words", WORDS)
def test_tags_that_are_mentioned_are_words(words):
    assert find_calls(WORDS[words]) == [] and visible(WORDS[words]).strip() == WORDS[words].strip()


@pytest.mark.parametrize("wrong", WRONG)
def test_what_looks_like_a_call_and_cannot_be_read_says_why(wrong):
    [call] = find_calls(WRONG[wrong])
    assert isinstance(call, BadCall) and call.why.startswith("Nothing was run: ") and "\n" not in call.why


MARKUP = ["</tool_call>", "</parameter>", "<parameter=x>", "</function>", "</invoke>", "<think>", "</think>", "```\n", "```",
          "a <think> b </think> c", "<tool_call>{}</tool_call>", "[TOOL_CALLS]", "</arg_value>", "<|call|>", "'", "\\"]  # fmt: skip
HOLDERS = {
    "JSON": lambda text: f'<tool_call>{json.dumps({"name": "w", "arguments": {"x": text}})}</tool_call>',
    "fence": lambda text: "```json\n" + json.dumps({"name": "w", "arguments": {"x": text}}) + "\n```",
    "bare": lambda text: json.dumps({"name": "w", "arguments": {"x": text}}),
    "function": lambda text: f"<tool_call>\n<function=w>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>",
    "invoke": lambda text: f'<minimax:tool_call>\n<invoke name="w">\n<parameter name="x">{text}</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "keys": lambda text: f"<tool_call>w\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
    "mistral": lambda text: f'[TOOL_CALLS]w{json.dumps({"x": text})}',
    "kimi": lambda text: f'<|tool_call_begin|>functions.w:0<|tool_call_argument_begin|>{json.dumps({"x": text})}<|tool_call_end|>',
    "harmony": lambda text: f'<|channel|>commentary to=functions.w <|constrain|>json<|message|>{json.dumps({"x": text})}<|call|>',
    "kimi3": lambda text: f'<|open|>call tool="w"<|sep|><|open|>argument key="x" type="string"<|sep|>{text}<|close|>argument<|sep|><|close|>call<|sep|>',
    "kimi3 dropped": lambda text: f'toolscall tool="w" index="1"argument key="x" type="string"{text}argumentcalltools',
    "mistral dropped": lambda text: f'w{json.dumps({"x": text})}',
    "kimi bare": lambda text: f"functions.w:0{json.dumps({'x': text})}",
    "harmony bare": lambda text: f"commentary to=functions.w json{json.dumps({'x': text})}",
    "python": lambda text: f"<function_calls>w(x={text!r})</function_calls>",
}  # fmt: skip


@pytest.mark.cases(60)
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("markup", MARKUP)
def test_markup_in_a_value_belongs_to_it(holder, markup):
    for value in (markup, f"before {markup} after", f"print('{markup}')\nprint(2)"):
        text = HOLDERS[holder](value)
        assert find_calls(text) == [ToolCall("w", {"x": value})], text
        assert find_calls(visible(text)) == [ToolCall("w", {"x": value})]
        assert find_calls(f"<think>hm</think>\n{text}\n") == [ToolCall("w", {"x": value})]


@pytest.mark.parametrize("code", ["a = 1\nprint(a)", "if 1:\tprint(1)", r"re.findall('\d+', s)", r"\sum x", "a\r\nb"])
def test_strings_hold_what_models_write(code):
    call = '{"name":"python","arguments":{"code":"CODE"}}'.replace("CODE", code)
    assert find_code(f"<tool_call>{call}</tool_call>") == find_code(call) == code


def test_templates_write_values_that_their_notation_does_not_have():
    """LFM2.5's puts line breaks into short strings, and Gemma 4's has Python's None."""
    text = "<|tool_call_start|>[run(code='def f(x):\n\treturn \"x\"\n', n=1)]<|tool_call_end|>"
    [call] = find_calls(text)
    assert isinstance(call, ToolCall) and call.arguments == {"code": 'def f(x):\n\treturn "x"\n', "n": 1}
    [call] = find_calls('<|tool_call>call:run{a:{b:None},None:<|"|>None<|"|>}<tool_call|>')
    assert isinstance(call, ToolCall) and call.arguments == {"a": {"b": None}, "None": "None"}


V2 = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r"}
TOLD = ("", "Let me compute.\nNow: ")


def listed(calls, text):
    """As LFM2's templates write calls; `text`: how a text stands between single quotes."""

    def value(one):
        return f"'{text(one)}'" if isinstance(one, str) else json.dumps(one) if isinstance(one, dict) else str(one)

    each = (f"{name}({', '.join(f'{key}={value(one)}' for key, one in given.items())})" for name, given in calls)
    return f"<|tool_call_start|>[{', '.join(each)}]<|tool_call_end|>"


WRITTEN = {
    "lfm2.5": lambda calls, told: told + listed(calls, str),
    "lfm2": lambda calls, told: told + listed(calls, lambda text: "".join(V2.get(char, char) for char in text)),
    "functionary 3.2": lambda calls, told: ("all\n" + told if told else "")
    + "".join(f">>>{name}\n{json.dumps(given)}" for name, given in calls)[0 if told else 3 :],
    "functionary 3.1": lambda calls, told: told + "".join(f"<function={name}>{json.dumps(given)}</function>" for name, given in calls),
    "kimi k2": lambda calls, told: told + "<|tool_calls_section_begin|>" + "".join(
        f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{json.dumps(given, ensure_ascii=False)}<|tool_call_end|>"
        for n, (name, given) in enumerate(calls)) + "<|tool_calls_section_end|>",
}  # fmt: skip
# Where a client gives the arguments as the text that the API has, some templates write that text as JSON once more.
TWICE = {
    "functionary 3.1": lambda text: f"<function=run>{text}</function>",
    "kimi k2": lambda text: f"<|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>{text}<|tool_call_end|>",
    "kimi k2 without special tokens": lambda text: f"functions.run:0{text}",
    "deepseek r1": lambda text: f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>run\n```json\n{text}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek v3.1": lambda text: f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>run<｜tool▁sep｜>{text}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "gpt-oss": lambda text: f"<|channel|>commentary to=functions.run <|constrain|>json<|message|>{text}<|call|>",
    "apertus": lambda text: f'<|tools_prefix|>[{{"run": {text}}}]<|tools_suffix|>',
    "gemma 4": lambda text: f"<|tool_call>call:run{{{json.loads(text)}}}<tool_call|>",
    "kimi k3": lambda text: f'<|open|>call tool="run"<|sep|><|open|>json type="object"<|sep|>{json.loads(text)}<|close|>json<|sep|><|close|>call<|sep|>',
    "solar": lambda text: f"<|tool_calls|><|tool_call:begin|>functions.run:0<|tool_call:name|>run<|tool_call:args|>{json.loads(text)}<|tool_call:end|><|calls|>",
}  # fmt: skip
GIVEN = [
    {"s": "3 + 4"}, {}, {"s": "", "t": " "}, {"n": 12345678901234567890, "x": -0.0015, "b": True}, {"b": False, "n": 0},
    {"o": {"a": [1, {"b": "c"}], "d": {"e": None}}, "l": [1, "two", [3], {"k": False}]}, {"z": None, "s": "x"},
    {"s": "Grüße, 東京 🚀 — “quoted” é"}, {"s": "def f(x):\n    return x\n\nprint(f(1))\n\ttab"}, {"s": "12", "t": "null"},
    {"s": 'a <tool_call>{"name": "x"}</tool_call> </parameter> <think>no</think> </function>'}, {"s": "a, b: c = d; e(f) {g} [h]"},
    {"s": "he said 'no' and \"yes\""}, {"s": "it's", "t": "don't, it's=1"}, {"s": "C:\\dir\\file.txt"}, {"s": "\\frac{1}{2} + \\sqrt{x}"},
    {"s": "re.findall('\\d+', s)"}, {"s": "print('a', end='')"}, {"s": "'quoted'"}, {"s": "ends with '"}, {"s": "' begins"},
    {"s": "smile :) and ("}, {"l": ["it's", 'a "b"', "new\nline"]}, {"o": {"k'": 'v"', "n": "a\nb"}}, {"s": "a=1, b=2"},
    {"s": ">>>all\nhello"}, {"s": "\\"}, {"l": [], "o": {}}, {"s": "f('a', b='c')", "n": 1}, {"s": "line\r\nline"},
]  # fmt: skip


@pytest.mark.cases(120)
@pytest.mark.parametrize("name", ["run", "web.get-it"])
@pytest.mark.parametrize("form", WRITTEN)
def test_values_of_all_kinds_come_back(form, name):
    schema = {"type": "object", "properties": {**PROPERTIES, "z": {"type": ["string", "null"]}}}
    for number, one in enumerate(GIVEN):
        for many, told in ((1, TOLD[0]), (2, TOLD[1]), (3, TOLD[0])):
            wanted = [(name, one), *((name, GIVEN[(number * 7 + n * 5) % len(GIVEN)]) for n in range(1, many))]
            text = WRITTEN[form](wanted, told)
            words, calls = split_calls(text, tools={name: schema})
            assert [(call.name, with_types(call, schema)) for call in calls] == wanted, text
            assert words == told.strip(), text


@pytest.mark.parametrize("form", TWICE)
def test_arguments_that_are_a_text_of_json_are_read(form):
    for one in GIVEN:
        text = TWICE[form](json.dumps(json.dumps(one)))
        assert find_calls(text, tools={"run": {}}) == [ToolCall("run", one)], text
    assert isinstance(find_call(TWICE[form](json.dumps("{x")), {"run": {}}), BadCall)


CITED = {
    "ticks": "As `{}` shows, it is easy.", "two ticks": "As ``{}`` shows.", "quotes": 'One writes "{}" for that. It is 7.',
    "curly": "One writes \u201c{}\u201d for that.", "single": "One writes '{}' for that.", "comment": "<!-- {} -->\nIt is 7.",
    "code": "<code>{}</code> is how. It is 7.", "pre": "<pre>\n{}\n</pre>\nIt is 7.", "latex": "\\begin{verbatim}\n{}\n\\end{verbatim}\nIt is 7.",
    "table": "| tool | form |\n|---|---|\n| calculator | {} |\nIt is 7.", "bare table": "tool | form\n--- | :-:\ncalculator | {}\nIt is 7.",
    "cell": "<table><tr><td>{}</td></tr></table> It is 7.", "element": '<CODE class="xml">{}</CODE> is how.', "blockquote": "<blockquote>\n{}\n</blockquote>\nIt is 7.",
    "example": "<example>\n{}\n</example>\nIt is 7.", "struck": "~~{}~~ was wrong. It is 7.", "listing": "\\begin{lstlisting}[language=XML]\n{}\n\\end{lstlisting}\nIt is 7.",
    "verb": "\\verb\u00a7{}\u00a7 is how.", "texttt": "\\texttt{{}} is how.", "guillemets": "On \u00e9crit \u00ab {} \u00bb ainsi.", "low": "Man schreibt \u201e{}\u201c daf\u00fcr.",
    "corner": "\u5199\u4f5c\u300c{}\u300d\u5373\u53ef\u3002", "latex quotes": "One writes ``{}'' for that.", "three quotes": 'One writes """{}""" so.', "a stop": 'One writes "{}."',
    "tildes": "~~~markdown\n{}\n~~~\nIt is 7.", "forum": "[quote=Ann]{}[/quote] It is 7.", "item": "1. > {}\nIt is 7.", "cdata": "<![CDATA[{}]]> It is 7.",
    "org": "#+begin_example\n{}\n#+end_example\nIt is 7.", "other language": "```js\n{}\n```\nIt is 7.", "markdown": "```markdown\n{}\n```\nIt is 7.", "block": "He said:\n> {}\nIt is 7.",
}  # fmt: skip
ON_A_LINE = {form: text for form, text in RIGHT.items() if not re.search(r"[\n`]|</?think|<\|think|analysis|response", text)
             and form not in ("llama4 pythonic", "unclosed", "midline", "kimi3 cut", "granite3", "granite20b")}  # fmt: skip


@pytest.mark.cases(60)
@pytest.mark.parametrize("cited", CITED)
@pytest.mark.parametrize("form", ON_A_LINE)
def test_a_call_that_is_quoted_is_not_made(form, cited):
    quotation = CITED[cited].replace("{}", ON_A_LINE[form])
    if (cited, form) == ("cdata", "minicpm5"):
        return  # it ends within
    assert not [call for call in find_calls(quotation, tools=TOOLS) if isinstance(call, ToolCall)], quotation
    both = f"{quotation}\n{RIGHT['hermes']}"
    assert find_calls(both, tools=TOOLS)[-1:] == [ToolCall("calculator", A)], both


@pytest.mark.parametrize("text", [
    '"<tool_call>CALL</tool_call>"', "<code><tool_call>CALL</tool_call>", "<!-- <tool_call>CALL</tool_call>", "a -> <tool_call>CALL</tool_call>",
    "I write <td> with <tool_call>CALL</tool_call>", "The <pre> tag. <tool_call>CALL</tool_call> </prefix>", "[quote] <tool_call>CALL</tool_call>",
    '\u00aba\u00bb <tool_call>CALL</tool_call> \u00abb\u00bb', 'I say "yes" <tool_call>CALL</tool_call> "no"', "a | b\n<tool_call>CALL</tool_call> | c",
    "| a | b |\n|---|---|\n| 1 | 2 |\n<tool_call>CALL</tool_call>", "It's <tool_call>CALL</tool_call> 'x'", "~~3 \n<tool_call>CALL</tool_call> ~~4",
    "<think><code></think><tool_call>CALL</tool_call></code>", "<code>hm</code>\n<tool_call>CALL</tool_call>", "Say \"yes\": <tool_call>CALL</tool_call>",
])  # fmt: skip
def test_marks_of_quotations_hide_no_call_that_is_meant(text):
    assert find_calls(text.replace("CALL", J), tools=TOOLS) == [ToolCall("calculator", A)]


@pytest.mark.parametrize("text, number", [
    ('So.\ncalculator(expression="3 + 4")', 1), ('[calculator(expression="3 + 4")]\nThen I wait.', 1), ('So: [calculator(expression="3 + 4")]', 1),
    ('Now.\ncalculator(expression="3 + 4")\ncalculator(expression="3 + 4")\nDone.', 2), ('- [calculator(expression="3 + 4"), calculator(expression="3 + 4")]', 2),
    ('I use calculator(expression="3 + 4") for it.', 0), ("calculator() is what I need", 0), ('> calculator(expression="3 + 4")\nIs it?', 0),
    ("x [calculator(3 + 4)]", 0), ('calculator(expression="3 + 4") == 7', 1), ("So I need calculator() here.", 0),
])  # fmt: skip
def test_calls_in_pythons_notation_amid_words(text, number):
    assert find_calls(text, tools=TOOLS) == [ToolCall("calculator", A)] * number


def judged(texts, agents=(("h", False), ("a", True))):
    """Scores of `--coach rules` of an episode of these texts: of each turn, None where it has none."""
    team = Team(tuple(AgentSpec(name, with_answer=answers) for name, answers in agents))
    session = Session(
        MathEnv(
            tasks=[Task("t:0", "What is 3 + 4?", "7")], team=team, workflow="tools", tools=("calculator",), tool_turns=2
        ).spawn()
    )
    observations, _ = session.reset(seed=1)
    scores: list[float | None] = []
    latest = {}
    for text in texts:
        latest |= dict.fromkeys(observations, len(scores))
        scores.append(None)
        result = session.step(dict.fromkeys(observations, text))
        for agent, evidence in result.info.get("evidence", {}).items():
            if evidence.rules is not None:
                scores[latest[agent]] = evidence.rules.score
        observations = result.observations
    assert not observations
    return scores


@pytest.mark.cases(60)
@pytest.mark.parametrize("form", RIGHT)
def test_the_rules_coach_scores_right_and_wrong_calls_in_every_form(form):
    """Every turn gets a score: one without leaves the loss, and many of them have the update skipped."""
    right = RIGHT[form]
    assert judged([right, "done", r"\boxed{7}"]) == [10.0, 7.0, 5.0]
    assert judged([right, r"\boxed{7}"], (("a", True),)) == [10.0, 5.0]
    assert judged([right.replace("3 + 4", "5 + 4"), "done", r"\boxed{8}"]) == [5.0, 2.0, 0.0]
    for wrong in (right.replace("3 + 4", "3 + ("), right.replace("calculator", "calcuLator"), right.replace("expression", "expresion")):  # fmt: skip
        assert wrong != right and judged([wrong, r"\boxed{7}"], (("a", True),)) == [1.0, 5.0]


@pytest.mark.parametrize(
    "opening, closing",
    [("<td>", "</td>"), ("<code>", "</code>"), ("[code]", "[/code]"), (r"\begin{verbatim}", r"\end{verbatim}")],
)
def test_a_quotation_does_not_end_within_a_call(opening, closing):
    value = f"x{closing}y"
    text = f"I write {opening} first. <tool_call>{json.dumps({'name': 'w', 'arguments': {'x': value}})}</tool_call>"
    assert find_calls(text) == [ToolCall("w", {"x": value})]
    assert find_code(f"I write {opening} first.\n```python\nprint('{closing}')\n```") == f"print('{closing}')\n"


PROGRAMS = ["print(1)", "print(1); print(2)", "import math\nprint(math.pi)", "x = {'a': 1}\nprint(x)", "f(x=1); g(2)"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_behind_a_mark_of_llama_or_functionary_is_one(program):
    tools = {"python": {"properties": {"code": {"type": "string"}}}}
    for text in (f"<|python_tag|>{program}", f"<|python_tag|>{program}<|eom_id|>", f"<|python_tag|>{json.dumps({'code': program})}",
                 f">>>python\n{program}", f"python\n{program}", f"all\nSo.>>>python\n{program}", f"python\n{program}>>>all\nSo."):  # fmt: skip
        assert find_calls(text, tools=tools) == [ToolCall("python", {"code": program})], text
    assert find_calls("python\nis the language that I know best", tools=tools) == []
    assert find_calls("calculator\nis a word", tools=TOOLS) == find_calls("all\nthe birds") == []
    assert visible("all\nthe birds") == "all\nthe birds" and visible(">>>all\nIt is 7.") == "It is 7."


def test_null_and_what_is_empty_have_the_types_of_the_schema():
    schema = {
        "properties": {
            "z": {"type": ["string", "null"]},
            "l": {"type": "array"},
            "o": {"anyOf": [{"type": "object"}]},
            "s": {"type": "string"},
        }
    }
    given = {"z": "None", "l": "", "o": "", "s": ""}
    assert with_types(ToolCall("f", given, texts=True), schema) == {"z": None, "l": [], "o": {}, "s": ""}
    assert with_types(ToolCall("f", {"z": "nil", "s": "null"}, texts=True), schema) == {"z": "nil", "s": "null"}


PROPERTIES = {"s": {"type": "string"}, "t": {"type": "string"}, "n": {"type": "integer"}, "x": {"type": "number"},
              "b": {"type": "boolean"}, "o": {"type": "object"}, "l": {"type": "array"}}  # fmt: skip
RENDERED = [
    [{"s": "3 + 4"}], [{}], [{"s": "", "t": " "}], [{"n": 12345678901234567890, "x": -0.0015, "b": True}],
    [{"o": {"a": [1, {"b": "c"}], "d": {"e": None}}, "l": [1, "two", [3], {"k": False}]}],
    [{"s": "Grüße, 東京 🚀 — “quoted” é"}], [{"s": "def f(x):\n    return x\n\nprint(f(1))\n\ttab"}],
    [{"s": 'a <tool_call>{"name": "x"}</tool_call> </parameter> <think>no</think> </function>'}],
    [{"s": "12", "t": "null"}], [{"s": "```python\nprint(1)\n```"}], [{"s": "a, b: c = d; e(f) {g} [h]"}],
    [{"s": "1"}, {"t": "2"}],
]  # fmt: skip
SPOKEN = ("qwen3", "qwen2_5", "qwen3_5_think", "qwen3_8", "glm4moe", "gptoss", "deepseekv3", "gemma4_v5",
          "nemotron_3_nano", "llama3_1", "lfm2_v2", "lfm2_2_5_v2")  # fmt: skip


@pytest.mark.slow
@pytest.mark.cases()
@pytest.mark.skipif(find_spec("trl") is None, reason="trl, which has the families' templates, is not installed")
@pytest.mark.parametrize("family", SPOKEN)
def test_what_a_familys_template_renders_is_read_back(family):
    from helpers_models import tiny_tokenizer

    tokenizer, folder = tiny_tokenizer(), Path(find_spec("trl").origin).parent / "chat_templates"
    tokenizer.chat_template = (folder / f"{family}.jinja").read_text(encoding="utf-8")
    schema = {"type": "object", "properties": PROPERTIES}
    tools = [{"type": "function", "function": {"name": "run", "description": "runs", "parameters": schema}}]
    for wanted in RENDERED[:-1] if family in ("gptoss", "llama3_1") else RENDERED:  # these write one call
        given = [json.dumps(one) if family == "deepseekv3" else one for one in wanted]
        calls = [{"type": "function", "id": "a", "function": {"name": "run", "arguments": one}} for one in given]
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
        asked = tokenizer.apply_chat_template(chat[:1], tools=tools, tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(chat, tools=tools, tokenize=False)
        begin = next((n for n, (one, other) in enumerate(zip(asked, whole, strict=False)) if one != other), len(asked))
        said = re.sub(r"(\s|<\|(im_end|eot_id|user|call)\|>|<｜end▁of▁sentence｜>)+$", "", whole[begin:])
        assert [with_types(call, schema) for call in find_calls(said, tools={"run": schema})] == wanted


def test_tags_within_tags_are_objects_and_lists():
    tree = (
        ("a", "5"),
        ("opts", (("k", (("item", "x < y"), ("item", "<b>z</b>"))), ("n", "2"))),
        ("items", (("item", "1"),)),
    )
    schema = {"properties": {"a": {"type": "integer"}, "opts": {"type": "object", "properties": {"n": {"type": "number"}}},
                             "items": {"type": "array", "items": {"type": "integer"}}}}  # fmt: skip

    def written(inside, sign):
        return (
            inside
            if isinstance(inside, str)
            else "".join(f"{sign}<{k}>{written(v, sign)}{sign}</{k}>" for k, v in inside)
        )

    for sign in (M3, ""):
        call = find_call(
            f'{sign}<tool_call>\n{sign}<invoke name="f">{written(tree, sign)}{sign}</invoke>\n{sign}</tool_call>'
        )
        k = ["x < y", "<b>z</b>"] if sign else ["x < y", {"b": "z"}]  # its signs tell tags from text
        assert with_types(call, schema) == {"a": 5, "opts": {"k": k, "n": 2}, "items": [1]}
    assert isinstance(find_call(f'{M3}<tool_call>{M3}<invoke name="f">{M3}<a>5'), BadCall)


def test_a_call_without_arguments_beside_one_that_has_some():
    inner = "<tool_call:o>now<tool_sep:o>\n</tool_call:o>\n<tool_call:o>f<tool_sep:o>\n<arg_key:o>a</arg_key:o>\n<arg_value:o>3</arg_value:o>\n</tool_call:o>"
    calls = find_calls(f"<tool_calls:o>\n{inner}\n</tool_calls:o>")
    assert [(call.name, call.arguments) for call in calls] == [("now", {}), ("f", {"a": "3"})]


def test_values_that_python_prints_are_read_where_the_schema_has_objects_and_lists():
    schema = {"properties": {"items": {"type": "array"}, "opts": {"type": "object"}, "text": {"type": "string"}}}
    call = ToolCall("f", {"items": "['x', None]", "opts": "{'k': [1, True]}", "text": "['x']"}, texts=True)
    assert with_types(call, schema) == {"items": ["x", None], "opts": {"k": [1, True]}, "text": "['x']"}
    assert with_types(ToolCall("f", {"items": "[x, y"}, texts=True), schema) == {"items": "[x, y"}


def test_words_before_the_calls():
    assert split_calls(f"<think>x</think>Let me see.\n{RIGHT['qwen xml']}") == (
        "Let me see.",
        [ToolCall("calculator", A)],
    )
    assert split_calls("It is 7.") == ("It is 7.", [])
    assert split_calls('<tool_call>{"name": ') == ("", find_calls('<tool_call>{"name": '))


def test_calls_in_thoughts_are_none():
    for form in ("hermes", "qwen xml", "kimi", "mistral new", "xlam fence", "glm", "gemma3"):
        assert find_calls(f"<think>{RIGHT[form]}</think> It is 7.") == []
        assert find_calls(f"{RIGHT[form]}</think> It is 7.") == []
        assert find_calls(f"<think>{RIGHT[form]}") == []
    assert visible(RIGHT["harmony2"]).startswith("<|channel|>commentary") and "need a tool" not in visible(
        RIGHT["harmony2"]
    )
    assert (
        visible("<|channel|>analysis<|message|>3<|end|><|start|>assistant<|channel|>final<|message|>It is 7.")
        == "It is 7."
    )


def test_values_in_tags_get_the_types_of_the_schema():
    schema = {
        "properties": {
            "n": {"type": "integer"}, "f": {"type": "number"}, "b": {"type": "boolean"}, "l": {"type": "array"},
            "o": {"type": "object"}, "s": {"type": "string"}, "e": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "t": {}, "u": {"type": ["integer", "string"]}, "w": {"type": "integer"}, "k": {"enum": [1, 2]},
        }
    }  # fmt: skip
    given = {"n": "3", "f": "2.5", "b": "True", "l": "[1]", "o": '{"a": 1}', "s": "3", "e": "null", "t": "3", "u": "3",
             "w": "three", "k": "2", "x": "5"}  # fmt: skip
    wanted = {"n": 3, "f": 2.5, "b": True, "l": [1], "o": {"a": 1}, "s": "3", "e": None, "t": "3", "u": "3", "w": "three",
              "k": 2, "x": "5"}  # fmt: skip
    body = "".join(f"<parameter={key}>{value}</parameter>" for key, value in given.items())
    [call] = find_calls(f"<tool_call><function=f>{body}</function></tool_call>")
    assert call == ToolCall("f", given) and with_types(call, schema) == wanted
    assert with_types(ToolCall("f", given), schema) == given  # JSON has types of its own


@pytest.mark.parametrize("piece", ["<a ", "<calculator ", '{"name": "calculator", ', "Action: ", "<tool_call>", "<tool_call>{", "<function=a>", '[{"', '{"a":', "\n ", "<tool_call>a ", "`", "<|tool_call_start|>[f(a='", "f(a='b", "[f(a='b')", ">>>a\n{",
                                   '<invoke name="a">', "<|channel|>", '{"name":"a","arguments":{', "functools[", "<think>", "a <think> b", "analysis", "functions.a:0{", "to=functions.a {",
                                   '<|open|>call tool="a"<|sep|>', '<|open|>argument key="a"<|sep|>', "<|open|>think<|sep|>"])  # fmt: skip
def test_no_text_takes_long(piece):
    started = time.process_time()
    find_calls(piece * 5000)
    find_calls(piece * 5000, tools=TOOLS)
    visible(piece * 5000)
    assert time.process_time() - started < 5  # quadratic work would take minutes


@pytest.mark.slow
@pytest.mark.parametrize("text", [
    "x " + "<tool_call>" * 18_000, "x " + "<|tool_call_begin|>" * 10_000, "x <think> " * 20_000,
    '<tool_call>{"name": "calculator", "arguments": {"a": "' + "\\" * 20_001, "[code=" * 20_000, "x [quote=a" * 20_000,
])  # fmt: skip
def test_repeated_openers_are_read_in_linear_time(text):
    """Each of them took from two seconds to hours."""
    started = time.process_time()
    find_calls(text, tools=TOOLS)
    visible(text)
    assert time.process_time() - started < 1.5


def test_a_call_behind_several_marks_or_escapes_is_read():
    call = '{"name": "calculator", "arguments": {"expression": "3 + 4"}}'
    for text in ("x <tool_call>\n<tool_call>\n\n" + call + "</tool_call>", f"<tool_call>{call}\n,\n{call}</tool_call>"):
        assert {found.name for found in find_calls(text)} == {"calculator"}
    [escaped] = find_calls(
        r"""<tool_call>{'name': 'calculator', 'arguments': {'expression': 'it\'s \\'}}</tool_call>"""
    )
    assert escaped == ToolCall("calculator", {"expression": "it's \\"})
