"""Several processes and machines, placed by Ray; see `docs/cluster.md`.

    this process               Ray's actors
    admission, journal,   -->  rollout workers   play episodes            `rollout_workers`
    filters, checkpoints  -->  trainer ranks     share the training       `ranks`
    publications          -->  SGLang servers    sample                   `servers`

Ray is imported when a run asks for it (`cluster.address`).
"""
