"""The label value that data, models and validation agree on."""

IGNORE_INDEX = -100  # a label that the loss ignores, as in torch.nn.CrossEntropyLoss
