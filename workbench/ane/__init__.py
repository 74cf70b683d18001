"""The Neural Engine by published rules and figures, without one at hand: what a program will
do there.

Time of a call, of a bundle or of an export that is only planned:

    work         the weights, caches and states that one call reads
    chips        the published figures of each chip
    features     work on a chip, and published measurements, as rows of one table
    formula      such a row → milliseconds; the fit of its four constants
    roofline     the fitted formula, with a 90% interval for every prediction
    advice       exports that are predicted to be faster
    timing       the same times by the formats of matrices, for mixed exports
    speculation  whether drafts and verifications pay

Where a program runs, and what it needs:

    rules        the lint rules, and the test of each on a program's graph
    placement    the units of a bundle's operations, by the rules or by Core ML's plan
    memory       bytes of a decoding process against a machine's memory"""
