"""The life of a request and the step that advances all of them."""
