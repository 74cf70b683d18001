"""Stateful packages of other exporters, described by one small file, `foreign.yaml`, run and
checked like bundles of our own."""
