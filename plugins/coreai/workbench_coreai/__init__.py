"""Apple's Core AI as a plug-in of the workbench: targets `coreai` (fp16) and
`coreai-fp32`, runtime `coreai`, command `crosscheck`."""
