"""The label value that data, models and validation agree on."""

IGNORE_INDEX = -100  # label of a token that the loss ignores, as in torch.nn.CrossEntropyLoss
