"""Where an error comes from. Each question has a file of its own:

    error.py      which part of the export adds how much of the error
    weights.py    which compressed weights cost most
    ranges.py     the range of every operation's results
    variants.py   which variant of Hugging Face's model a faulty bundle computes
    program_fault.py  in which layers gate `program` is RED, and which epsilon explains it
    sibling_programs.py  where a wrong layer's program differs from that of a right one
    weight_faults.py  whose values a wrong tensor holds, or in which order it has its own
    arrangements.py  what a tensor may store in place of its own values
    wrong_rows.py  which rows or columns of a tensor are wrong
    calls.py      which functions of other exporters' packages are wrong for several tokens
    operation.py  which operation a runtime computes wrongly

model_changes.py defines the variants that variants.py compares. `operation.find` uses four
files more: it records a bundle's calls and gives them to the bisection in search.py, which
builds small packages with cut.py and runs them with running.py; reduced.py then writes the
smallest one for a bug report, with a copy of show.py."""
