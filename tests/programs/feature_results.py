"""Writes the results of programs that use features: a JSON file for each rank."""

import json
import os


def write_results(features):
    """Call each of the functions, and write {feature: result}; an error is a result too."""
    results = {}
    for name, feature in features.items():
        try:
            results[name] = feature()
        except Exception as error:
            results[name] = repr(error)
    with open(os.environ["PROBE_OUT"] + os.environ.get("RANK", ""), "w") as file:
        json.dump(results, file, default=str)
