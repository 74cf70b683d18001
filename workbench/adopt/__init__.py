"""Runs and checks stateful packages of other exporters, which a small file,
`foreign.yaml`, describes."""
