"""Tables and charts as data, and the pages that show them: for comparisons, plans and simulations, without torch."""
