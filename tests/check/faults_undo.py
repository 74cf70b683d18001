"""Faults of taking tokens back: see `faults`."""

from functools import partial

from faults import every_sequences
from registry import in_memory

from workbench.bundle.names import is_cache

fault = partial(in_memory, "undo")


@fault("lfm2")
def undo_that_forgets_the_tail(decoder):
    """Goes on with the tail of the whole call."""

    def change(seqs):
        trim = seqs.trim

        def forgetful(count, seq=0):
            states = [pair for pair in seqs.named_states if not is_cache(pair[1])]
            values = [state.read(name) for state, name in states]
            count = trim(count, seq)
            for (state, name), value in zip(states, values):
                state.write(name, value)
            return count

        seqs.trim = forgetful

    every_sequences(decoder, change)


@fault("lfm2")
def undone_columns_stay_in_the_tail(decoder):
    """The call runs again with one more token than stays: a later token reads it."""

    def change(seqs):
        trim = seqs.trim

        def with_one_more(count, seq=0):
            count = trim(max(0, count - 1), seq)
            seqs.ids[seq].pop()
            seqs.floors[seq] = min(seqs.floors[seq], len(seqs.ids[seq]))
            return count + 1

        seqs.trim = with_one_more

    every_sequences(decoder, change)


@fault("lfm2", tail_undone_beyond_its_rows=())
@fault("ring", ring_trimmed_beyond_its_depth=())
def deeper(decoder) -> None:
    """Lets a decoder go back to any token."""

    def change(seqs):
        advance = seqs.advance

        def floorless(*arguments, **options):
            results = advance(*arguments, **options)
            seqs.floors = [0] * len(seqs.floors)
            return results

        seqs.advance = floorless

    every_sequences(decoder, change)


@fault()
def undo_of_one_token_too_few(decoder):
    def change(seqs):
        trim = seqs.trim
        seqs.trim = lambda count, seq=0: trim(max(0, count - 1), seq)

    every_sequences(decoder, change)
