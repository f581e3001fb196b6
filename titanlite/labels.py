"""The label values that data, models and validation agree on: the loss ignores all below 0."""

IGNORE_INDEX = -100  # as in torch.nn.CrossEntropyLoss
# Ignored too. In a packed sequence, which has these, they alone state where a document ends:
DOCUMENT_END = -101  # the next token begins another document
SAME_DOCUMENT = -102  # the next token belongs to the same document
