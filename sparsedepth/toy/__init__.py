"""Teacher-student networks: does loss fall with depth because layers compose, integrate, or average? (2602.05970)

    config      a definition, and a group: all students of one depth
    network     the networks, many at once          training    a group, from its config to its record
    record      a group's folder, and its views     exponents   how loss falls with depth   figure     both, drawn

Without torch: config, record, exponents and figure.
"""
