"""Strict schemas of the custom resources that the chart makes, as far as it uses them.

Written after the references of the Prometheus Operator and of KEDA; Kubernetes' own schemas do not
hold them. A field that is not here is refused.
"""

from typing import Any

TEXT = {"type": "string", "minLength": 1}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
SPAN = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h|d|w))+$"}
COUNT = {"type": "integer", "minimum": 0}


def _fields(required: str = "", **fields: Any) -> dict[str, Any]:
    """An object of these fields and no others; `required` names those that must be there."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": fields,
        "required": required.split(),
    }


def _some(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": item}


def _resource(spec: dict[str, Any]) -> dict[str, Any]:
    return _fields(
        "apiVersion kind metadata spec",
        apiVersion=TEXT,
        kind=TEXT,
        metadata=_fields("name labels", name=TEXT, labels=TEXTS),
        spec=spec,
    )


_ENDPOINT = _fields("port", port=TEXT, path=TEXT, interval=SPAN, scrapeTimeout=SPAN)
_SERVICE_MONITOR = _fields(
    "selector endpoints",
    jobLabel=TEXT,
    selector=_fields("matchLabels", matchLabels=TEXTS),
    endpoints=_some(_ENDPOINT),
)
_RULE = {
    **_fields("expr", record=TEXT, alert=TEXT, expr=TEXT, labels=TEXTS, annotations=TEXTS)
    | {"oneOf": [{"required": ["record"]}, {"required": ["alert"]}]}
}
_RULE["properties"]["for"] = SPAN
_GROUP = _fields("name rules", name=TEXT, interval=SPAN, rules=_some(_RULE))
_POLICY = _fields("type value periodSeconds", type=TEXT, value=COUNT, periodSeconds=COUNT)
_SCALING = _fields(
    "policies",
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    policies=_some(_POLICY),
)
_TRIGGER = _fields(
    "type metadata",
    type={"const": "prometheus"},
    metricType={"enum": ["AverageValue", "Value"]},
    metadata=_fields(
        "serverAddress query threshold", serverAddress=TEXT, query=TEXT, threshold=TEXT
    ),
)
_BEHAVIOR = _fields(behavior=_fields(scaleUp=_SCALING, scaleDown=_SCALING))
_SCALED_OBJECT = _fields(
    "scaleTargetRef triggers",
    scaleTargetRef=_fields("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
    minReplicaCount=COUNT,
    maxReplicaCount=COUNT,
    advanced=_fields(horizontalPodAutoscalerConfig=_BEHAVIOR),
    triggers=_some(_TRIGGER),
)

SCHEMAS = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _resource(_SERVICE_MONITOR),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _resource(
        _fields("groups", groups=_some(_GROUP))
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): _resource(_SCALED_OBJECT),
}


def is_custom(manifest: dict[str, Any]) -> bool:
    """Say whether a manifest is of a kind that has its schema here."""
    return (manifest["apiVersion"], manifest["kind"]) in SCHEMAS


def validate(manifest: dict[str, Any]) -> None:
    """Check a custom resource.

    Raises:
        jsonschema.ValidationError: a field is unknown, missing or of another type.
    """
    import jsonschema  # not at the top: tests that lack it are to be skipped with one reason

    jsonschema.validate(manifest, SCHEMAS[manifest["apiVersion"], manifest["kind"]])
