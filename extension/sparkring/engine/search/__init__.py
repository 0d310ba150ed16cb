"""A search for the best values of parameters. Optuna chooses the values and decides which trials to prune.

    space    what the user wrote for each parameter ─▶ Optuna's distributions
    search   the arguments of sparkring.search(), checked
    trials   one run of a search: asks Optuna for the next trial, and tells Optuna what the trials have reported
    journal  the file in which Optuna keeps the study, and a copy in the checkpoint directory

Optuna runs on the driver only. Ranks get only the values of the parameters.
"""
