"""The bits of a `RandomStream`, compiled by Numba to the processor's own instructions for AES, in a form that compiled
code can call block by block. Imported only where Numba is.

The instructions take the same time for every key, and two blocks at once. A block is 16 bytes, four words.

References:
    FIPS 197, section 5 (AES and the expansion of its key). NIST SP 800-38A, section 6.5 (counter mode). Gueron 2012,
    "Intel AES New Instructions set" (one round in one instruction, and the S-box by the last round).
"""

# Numba is not always there.
# pyright: reportMissingImports=false

from typing import no_type_check

import numpy as np

from sordino.installation import require

require("numba", "numba", user="compiled noise")

import numba  # noqa: E402
from llvmlite import ir  # noqa: E402
from numba.core import cgutils  # noqa: E402
from numba.core.registry import cpu_target  # noqa: E402
from numba.extending import intrinsic, register_jitable  # noqa: E402

_ROUNDS, _KEY_WORDS, _BLOCK_WORDS = 14, 8, 4
# A round's result is there some cycles later: meanwhile other registers take theirs.
_REGISTERS = 8
WORDS_AT_ONCE = 2 * _BLOCK_WORDS * _REGISTERS
_EXPANDED_WORDS = _BLOCK_WORDS * (_ROUNDS + 1)

_LANE, _HALF_BLOCK = ir.IntType(32), ir.IntType(64)
_BLOCK, _TWO_BLOCKS = ir.VectorType(_HALF_BLOCK, 2), ir.VectorType(_HALF_BLOCK, 4)
_BYTE, _THREE_BYTES, _ONE = np.uint32(8), np.uint32(24), np.uint32(1)


def is_supported() -> bool:
    """Whether Numba compiles for a processor that encrypts two blocks at once."""
    features = cpu_target.target_context.codegen().magic_tuple()[-1]
    return {"+vaes", "+avx2"} <= set(features.split(","))


@register_jitable
@no_type_check
def expand(key):
    """The round keys, 60 words, of a key of 8 words."""
    words = np.empty(_EXPANDED_WORDS, np.uint32)
    words[:_KEY_WORDS] = key
    constant = _ONE
    for i in range(_KEY_WORDS, _EXPANDED_WORDS):
        word = words[i - 1]
        if i % _KEY_WORDS == 0:
            # The bytes turned by one: the first of them is a word's lowest.
            word = _substituted(np.uint32(np.uint32(word >> _BYTE) | np.uint32(word << _THREE_BYTES))) ^ constant
            constant = np.uint32(constant << _ONE)
        elif i % _KEY_WORDS == _BLOCK_WORDS:
            word = _substituted(word)
        words[i] = words[i - _KEY_WORDS] ^ word
    return words


@register_jitable
@no_type_check
def fill(out, keys, first, count):
    """Write the words from position `first` of a stream on to `out`, at least `count` of them.

    Args:
        out: at least `count` words and two times `WORDS_AT_ONCE` more.
        keys: from `expand`.
        first: below 2⁶⁶.
        count: ≥ 0.

    Returns:
        Where in `out` the word of that position is: its block is written from its beginning.
    """
    skipped = first % _BLOCK_WORDS
    block = first // _BLOCK_WORDS
    for word in range(0, count + skipped, WORDS_AT_ONCE):
        _encrypt(out, word, keys, np.uint64(block + word // _BLOCK_WORDS))
    return skipped


# ----------------------------------------------------------------------------------------------------------------------
# Two functions that call instructions which have no name in Python.
# ----------------------------------------------------------------------------------------------------------------------


@no_type_check
def _instruction(builder, name, result, *arguments):
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}"), arguments)


@intrinsic
@no_type_check
def _substituted(_context, word):
    """The S-box on each byte of a word: the last round without a key, on a block whose columns are all alike."""

    def code(_target, builder, _signature, arguments):
        columns = ir.Constant(ir.VectorType(_LANE, _BLOCK_WORDS), [0] * _BLOCK_WORDS)
        for column in range(_BLOCK_WORDS):
            columns = builder.insert_element(columns, arguments[0], ir.Constant(_LANE, column))
        block, no_key = builder.bitcast(columns, _BLOCK), ir.Constant(_BLOCK, [0, 0])
        substituted = _instruction(builder, "x86.aesni.aesenclast", _BLOCK, block, no_key)
        return builder.extract_element(builder.bitcast(substituted, columns.type), ir.Constant(_LANE, 0))

    return numba.types.uint32(word), code


@intrinsic
@no_type_check
def _encrypt(_context, out, position, keys, counter):
    """Write `WORDS_AT_ONCE` words at `position` of `out`: the encrypted blocks counter, counter + 1, …"""

    def code(target, builder, signature, arguments):
        def address(array, place):
            data = target.make_array(signature.args[place])(target, builder, array).data
            return builder.bitcast(data, _HALF_BLOCK.as_pointer())

        def index(number):
            return ir.Constant(_HALF_BLOCK, number)

        round_keys, made = address(arguments[2], 2), address(arguments[0], 0)
        keys_of_rounds = []
        for number in range(_ROUNDS + 1):
            place = builder.bitcast(builder.gep(round_keys, [index(2 * number)]), _BLOCK.as_pointer())
            key = builder.load(place, align=4)
            twice = ir.Constant(ir.VectorType(_LANE, 4), [0, 1, 0, 1])
            keys_of_rounds.append(builder.shuffle_vector(key, key, twice))

        # A block counts with its last bytes, the highest first.
        base = ir.Constant(_TWO_BLOCKS, [0] * 4)
        for low in (1, 3):
            base = builder.insert_element(base, arguments[3], ir.Constant(_LANE, low))
        states = []
        for register in range(_REGISTERS):
            counters = builder.add(base, ir.Constant(_TWO_BLOCKS, [0, 2 * register, 0, 2 * register + 1]))
            block = _instruction(builder, "bswap.v4i64", _TWO_BLOCKS, counters)
            states.append(builder.xor(block, keys_of_rounds[0]))
        for key in keys_of_rounds[1:-1]:
            states = [_instruction(builder, "x86.aesni.aesenc.256", _TWO_BLOCKS, state, key) for state in states]
        for register, state in enumerate(states):
            encrypted = _instruction(builder, "x86.aesni.aesenclast.256", _TWO_BLOCKS, state, keys_of_rounds[-1])
            # The position counts words, the address halves of blocks.
            half = builder.add(builder.lshr(arguments[1], index(1)), index(4 * register))
            builder.store(encrypted, builder.bitcast(builder.gep(made, [half]), _TWO_BLOCKS.as_pointer()), align=4)
        return target.get_dummy_value()

    return numba.types.void(out, position, keys, counter), code
