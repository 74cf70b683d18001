"""The Neural Engine by published rules and figures: lint, placement, roofline,
memory."""
