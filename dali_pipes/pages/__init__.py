"""Write HTML pages that need no other file: `page` has the document and its parts, `charts` the drawings."""
