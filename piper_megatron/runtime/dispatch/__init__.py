"""The token dispatcher: how the rows of tokens reach their experts and come back."""
