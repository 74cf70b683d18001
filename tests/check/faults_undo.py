"""Faults of taking tokens back: see `faults`."""

from functools import partial

from registry import in_memory

from workbench.bundle.names import is_cache

fault = partial(in_memory, "undo")


@fault("lfm2")
def undo_that_forgets_the_tail(decoder):
    """Goes on with the tail of the whole call."""
    trim = decoder.trim

    def forgetful(count, seq=0, seqs=None):
        states = [each for each in seqs.named_states if not is_cache(each[1])]
        held = [state.read(name) for state, name in states]
        count = trim(count, seq, seqs)
        for (state, name), value in zip(states, held):
            state.write(name, value)
        return count

    decoder.trim = forgetful


@fault("lfm2")
def undone_columns_stay_in_the_tail(decoder):
    """The call runs again with one more token than stays: a later token reads it."""
    trim = decoder.trim

    def undone(count, seq=0, seqs=None):
        count = trim(max(0, count - 1), seq, seqs)
        seqs.ids[seq].pop()
        seqs.floors[seq] = min(seqs.floors[seq], len(seqs.ids[seq]))
        return count + 1

    decoder.trim = undone


@fault("lfm2", tail_undone_beyond_its_rows=())
@fault("ring", ring_trimmed_beyond_its_depth=())
def deeper(decoder) -> None:
    """Lets a decoder go back to any token."""
    advance = decoder.advance

    def floorless(seqs, *arguments, **options):
        results = advance(seqs, *arguments, **options)
        seqs.floors = [0] * len(seqs.floors)
        return results

    decoder.advance = floorless


@fault()
def undo_of_one_token_too_few(decoder):
    trim = decoder.trim
    decoder.trim = lambda count, seq=0, seqs=None: trim(max(0, count - 1), seq, seqs)
