"""Apple's Core AI as a plug-in of the workbench: the targets `coreai` (fp16) and
`coreai-fp32`, the runtime `coreai` and the command `crosscheck`.

In the order in which data flows:

- `target.py`: what the workbench asks of a target; refuses options
- `template.py`: writes the shards of one shape, one `.aimodel` folder each
- `weights.py`: a stored weight as a torch module, and in a traced program
- `trace.py`: a shard's module → a program in Apple's operations
- `asset.py`: a program with its weights → the files of an `.aimodel` folder
- `aimodel.py`: reads the weights in these files; imports Apple's packages
- `runtime.py`: runs the folders
- `crosscheck.py`, `command.py`: compare both runtimes with Hugging Face's model
"""
