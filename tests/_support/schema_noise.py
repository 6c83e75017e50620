"""Random values of a JSON schema, with odd values mixed in."""

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
    """Return deeply nested JSON text."""
    return '{"a":' * depth + "1" + "}" * depth if bracket == "{" else "[" * depth + "]" * depth


def value(schema, definitions, rng, *, noise=1 / 12):
    """Return a value of the schema, or an odd one with probability `noise`."""
    if rng.random() < noise:
        return rng.choice(ODD)

    def inner(part):
        return value(part, definitions, rng, noise=noise)

    if "$ref" in schema:
        return inner(definitions[schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return inner(rng.choice(schema["anyOf"]))
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        required = schema.get("required", ())
        return {
            name: inner(part)
            for name, part in schema["properties"].items()
            if name in required or rng.random() < 0.25
        }
    if kind == "array":
        size = schema.get("minItems", 0) + rng.randrange(3)
        return [inner(schema.get("items", {})) for _ in range(size)]
    makers = {
        "string": lambda: rng.choice(TEXTS),
        "integer": lambda: rng.randint(max(schema.get("minimum", -3), -3), 3),
        "number": lambda: rng.uniform(schema.get("minimum", -1), schema.get("maximum", 1)),
        "boolean": lambda: rng.random() < 0.5,
        "null": lambda: None,
        "object": lambda: {"a": rng.choice(ODD)},
    }
    return makers.get(kind, lambda: rng.choice(ODD))()


def mutated(valid, rng):
    """Return a valid request with one field changed, dropped or added anywhere."""
    body = json.loads(json.dumps(valid))
    places = list(_places(body))
    holder, key = rng.choice(places)
    what = rng.random()
    if what < 0.7:
        holder[key] = rng.choice(ODD)
    elif what < 0.85 or not isinstance(holder, dict):
        del holder[key]
    else:
        holder[rng.choice(("", "type", "role", "\ud800", "id", "extra"))] = rng.choice(ODD)
    return body


def _places(body):
    items = body.items() if isinstance(body, dict) else enumerate(body)
    for key, item in list(items):
        yield body, key
        if isinstance(item, dict | list):
            yield from _places(item)


def body_bytes(content, rng):
    """Return a body as JSON text, sometimes malformed."""
    text = json.dumps(content)
    what = rng.random()
    if what < 0.9:
        return text.encode()
    return rng.choice(
        (
            b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", text.encode("utf-16"), b"9" * 6000,
            text.encode()[:-1], text.encode() + b"x", b"\xef\xbb\xbf" + text.encode(),
            nested(100_000).encode(), nested(400, "{").encode(), nested(250, "{").encode(),
            b'{"seed": 1, "seed": 2, "seed": NaN}', b'{"a":' + b"1" * 5000 + b"}", b"-Infinity",
            b'{"messages": ' + nested(280).encode() + b"}", b"\0" * 40,
        )
    )  # fmt: skip
