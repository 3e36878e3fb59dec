"""The page's sections, one module each: from the stages' figures to what is shown of them."""
