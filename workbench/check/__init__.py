"""Checks whether a bundle computes what Hugging Face's model computes: references,
gates, what compression costs.

A checkpoint gives references, a decoder gives the same values of a bundle, and both are
compared. A comparison becomes a `Gate`, gates give two verdicts, and the verdicts are
stored in the bundle's folder. `validate` is the entry, and calls the files below in this
order.

References and values, as records of one kind:

    trace           `Trace`: the values of one pass over a prompt, by layer
    hf              `Reference`: Hugging Face's model, whose trace is the reference
    golden          a reference that is stored in a file; the weights that a bundle stores
    text            default texts, and whether a text is one that a bundle was fitted to
    run             the trace of a bundle, isolated (layers are fed) or chained
    compare         `errors`: the distance of two traces, and what rounding explains of it

Gates on the export, which need no tuning:

    gates           `Gate`, the two verdicts, and the file verdict.json
    bug_gates       which gates there are, and when a stored verdict stands for them
    interface       manifest, descriptions, programs and checkpoint agree
    weights         stored weights are the checkpoint's; with `stored_values` (one weight
                    and its tolerance), `kernels` (compiled comparisons), `deviation` (a
                    figure and its limit), `head_rows` (lost rows of the head)
    calibrated      the same for values that were fitted to a text: their inputs;
    row_statistics  the figures of their rows
    host            rope tables and masks
    distinct        which shards have the same program
    program         the program on the stored weights, in exact arithmetic;
    stretches       Hugging Face's side of it
    states          the states of a bundle: `state_life`, `write_address`, `stale_rows`,
                    `undo`
    device          a device beside the portable runtime

What compression costs, and everything at once:

    fidelity        `Cost`: every layer, position and T beside the golden, and the gate
                    `budget`; `cost` shows the KL as a table
    validate        all gates and the cost of a bundle
    shared          results that several validations in one process share
    units           one validation for each compute unit
    record          validation.parquet, from which a page is drawn

Other comparisons, each asked for by name:

    transcript      a bundle along Hugging Face's own greedy text, and where it ends; with
                    `greedy` (writes such texts) and `end_tokens` (which tokens end one)
    tasks           prompts with known answers
    evaluate        perplexity over a text, which `windows` divides
    reuse           sequences that a stored cache restores
    stream          the size of the residual stream, and attention sinks"""
