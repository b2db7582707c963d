"""Documents to text: PDFs and pictures, page by page, each in the cheapest way that is enough."""
