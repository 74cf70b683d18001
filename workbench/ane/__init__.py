"""What published rules and figures say of the Neural Engine: lint, predicted placement, roofline,
memory."""
