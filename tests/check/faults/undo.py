"""Faults of a loaded decoder that takes tokens back."""

from faults.decoders import change_sequences
from faults.fault import Fault
from workbench.bundle.names import is_cache


def keep_tail_of_whole_call(decoder):
    """An undo takes back the rows of the caches alone: every other state stays as it was after the
    whole call."""

    def change(seqs):
        trim = seqs.trim

        def trim_caches_only(count, seq=0):
            states = [
                (state, name) for state, name in seqs.named_states if not is_cache(name)
            ]
            values = [state.read(name) for state, name in states]
            count = trim(count, seq)
            for (state, name), value in zip(states, values):
                state.write(name, value)
            return count

        seqs.trim = trim_caches_only

    change_sequences(decoder, change)


def leave_undone_column(decoder):
    """An undo of n tokens takes n − 1 of them out of the states, and all n out of the ids: the
    next token reads a state that holds an undone one."""

    def change(seqs):
        trim = seqs.trim

        def trim_one_less(count, seq=0):
            count = trim(max(0, count - 1), seq)
            seqs.ids[seq].pop()
            seqs.min_lengths[seq] = min(seqs.min_lengths[seq], len(seqs.ids[seq]))
            return count + 1

        seqs.trim = trim_one_less

    change_sequences(decoder, change)


def allow_any_depth(decoder):
    """Lets `trim` take back more tokens than a ring or a tail still has the rows for."""

    def change(seqs):
        advance = seqs.advance

        def advance_without_min_lengths(*arguments, **options):
            results = advance(*arguments, **options)
            seqs.min_lengths = [0] * len(seqs.min_lengths)
            return results

        seqs.advance = advance_without_min_lengths

    change_sequences(decoder, change)


def take_back_one_token_less(decoder):
    def change(seqs):
        trim = seqs.trim
        seqs.trim = lambda count, seq=0: trim(max(0, count - 1), seq)

    change_sequences(decoder, change)


FAULTS = [
    Fault(
        "undo that forgets the tail",
        gate="undo",
        bundle="lfm2",
        plant=keep_tail_of_whole_call,
    ),
    Fault(
        "undone columns stay in the tail",
        gate="undo",
        bundle="lfm2",
        plant=leave_undone_column,
    ),
    Fault(
        "ring trimmed beyond its depth",
        gate="undo",
        bundle="ring",
        plant=allow_any_depth,
    ),
    Fault(
        "tail undone beyond its rows", gate="undo", bundle="lfm2", plant=allow_any_depth
    ),
    Fault("undo of one token too few", gate="undo", plant=take_back_one_token_less),
]
