"""Placeholder until the encoder lands."""
import orjson
def encode(value): 
    try: return orjson.dumps(value, default=repr, option=orjson.OPT_NON_STR_KEYS)
    except TypeError: return orjson.dumps(repr(value).encode("utf-8","backslashreplace").decode())
def decode(document): return document
