"""Values that a JSON schema describes, with noise in them."""

import json
import math

ODD = (
    None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, 2**70, -(2**70), 10**400, 1e300, -0.5, 1e-320,
    math.nan, math.inf, -math.inf, "", " ", "\ud800", "\0", "x" * 300, "²", "auto", "none",
    "required", "function", "7", "../../etc/passwd", "\u202e", [], {}, [None], [[]], {"a": []},
    {"": None}, {"type": ""}, {"type": None}, {"name": ""}, {"function": {}}, [{"type": "text"}],
)  # fmt: skip
TEXTS = (
    "function",
    "text",
    "message",
    "function_call",
    "user",
    "assistant",
    "auto",
    "7",
    "",
    "Hi.",
)


def nested(depth, bracket="["):
    """JSON text that is nested deeply."""
    return '{"a":' * depth + "1" + "}" * depth if bracket == "{" else "[" * depth + "]" * depth


def value(schema, definitions, dice, *, noise=1 / 12):
    """What a schema describes, or noise in some cases."""
    if dice.random() < noise:
        return dice.choice(ODD)

    def inner(part):
        return value(part, definitions, dice, noise=noise)

    if "$ref" in schema:
        return inner(definitions[schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return inner(dice.choice(schema["anyOf"]))
    if "enum" in schema:
        return dice.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        required = schema.get("required", ())
        return {
            name: inner(part)
            for name, part in schema["properties"].items()
            if name in required or dice.random() < 0.25
        }
    if kind == "array":
        size = schema.get("minItems", 0) + dice.randrange(3)
        return [inner(schema.get("items", {})) for _ in range(size)]
    makers = {
        "string": lambda: dice.choice(TEXTS),
        "integer": lambda: dice.randint(max(schema.get("minimum", -3), -3), 3),
        "number": lambda: dice.uniform(schema.get("minimum", -1), schema.get("maximum", 1)),
        "boolean": lambda: dice.random() < 0.5,
        "null": lambda: None,
        "object": lambda: {"a": dice.choice(ODD)},
    }
    return makers.get(kind, lambda: dice.choice(ODD))()


def mutated(valid, dice):
    """A valid request with one field changed, dropped or added, anywhere in it."""
    body = json.loads(json.dumps(valid))
    places = list(_places(body))
    holder, key = dice.choice(places)
    what = dice.random()
    if what < 0.7:
        holder[key] = dice.choice(ODD)
    elif what < 0.85 or not isinstance(holder, dict):
        del holder[key]
    else:
        holder[dice.choice(("", "type", "role", "\ud800", "id", "extra"))] = dice.choice(ODD)
    return body


def _places(body):
    items = body.items() if isinstance(body, dict) else enumerate(body)
    for key, item in list(items):
        yield body, key
        if isinstance(item, dict | list):
            yield from _places(item)


def body_bytes(content, dice):
    """A body as JSON text, sometimes with an error that no serializer makes."""
    text = json.dumps(content)
    what = dice.random()
    if what < 0.9:
        return text.encode()
    return dice.choice(
        (
            b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", text.encode("utf-16"), b"9" * 6000,
            text.encode()[:-1], text.encode() + b"x", b"\xef\xbb\xbf" + text.encode(),
            nested(100_000).encode(), nested(400, "{").encode(), nested(250, "{").encode(),
            b'{"seed": 1, "seed": 2, "seed": NaN}', b'{"a":' + b"1" * 5000 + b"}", b"-Infinity",
            b'{"messages": ' + nested(280).encode() + b"}", b"\0" * 40,
        )
    )  # fmt: skip
