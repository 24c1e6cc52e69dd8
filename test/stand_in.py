#!/usr/bin/env python3
"""Stands in for the metadata services and APIs of providers, for test_provider_hooks.

It answers as their documentation says (dev/cluster/hooks.md names the pages), and refuses a request with another address,
method, header, key or body.

  python3 test/stand_in.py FOLDER

FOLDER/certificate and FOLDER/key are for https. It writes its ports (http, https) to FOLDER/ports, reads FOLDER/state
before each answer, and then adds a line to FOLDER/requests: status, method, address, body. It ends when its input does.

The states: calm; notice, the machine will be taken; absent, nothing is found; garbage, answers of another kind; silent, no
answer; busy, an API refuses each request once, as it has too many.
"""
import json
import pathlib
import ssl
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

folder = pathlib.Path(sys.argv[1])
lock = threading.Lock()
refused = set()  # addresses, by an API that is busy

AWS, GCP = "http://169.254.169.254/latest", "http://metadata.google.internal/computeMetadata/v1/instance"
AZURE = "http://169.254.169.254/metadata"
AWS_TOKEN = {"X-aws-ec2-metadata-token": "secret-imds"}
GOOGLE, AZURE_HEADER = {"Metadata-Flavor": "Google"}, {"Metadata": "true"}
MACHINE = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachines/box"
PREEMPT = {"EventId": "1", "EventType": "Preempt", "ResourceType": "VirtualMachine", "Resources": ["box"],
           "EventStatus": "Scheduled", "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT"}
FREEZE = {**PREEMPT, "EventType": "Freeze", "Description": "It says: \"EventType\", Preempt, Reboot"}


def metadata(notice):
    """Of each address the headers that a GET needs, and the answer (None: 404)."""
    return {
        f"{AWS}/meta-data/spot/instance-action":
            (AWS_TOKEN, '{"action": "stop", "time": "2017-09-18T08:22:00Z"}' if notice else None),
        f"{AWS}/meta-data/instance-id": (AWS_TOKEN, "i-0123"),
        f"{AWS}/meta-data/placement/region": (AWS_TOKEN, "eu-west-1"),
        f"{GCP}/preempted": (GOOGLE, "TRUE" if notice else "FALSE"),
        f"{GCP}/maintenance-event": (GOOGLE, "TERMINATE_ON_HOST_MAINTENANCE" if notice else "NONE"),
        f"{GCP}/zone": (GOOGLE, "projects/42/zones/europe-west4-a"),
        f"{GCP}/name": (GOOGLE, "box"),
        f"{GCP}/service-accounts/default/token":
            (GOOGLE, '{"access_token":"secret-gcp","expires_in":3599,"token_type":"Bearer"}'),
        f"{AZURE}/scheduledevents?api-version=2020-07-01":
            (AZURE_HEADER, json.dumps({"DocumentIncarnation": 1, "Events": [PREEMPT] if notice else [FREEZE]},
                                      separators=(",", ":"))),
        f"{AZURE}/instance/compute/resourceId?api-version=2021-02-01&format=text": (AZURE_HEADER, MACHINE),
        f"{AZURE}/identity/oauth2/token?api-version=2018-02-01&resource=https%3A%2F%2Fmanagement.azure.com%2F":
            (AZURE_HEADER, '{"access_token":"secret-azure","expires_in":"3599","token_type":"Bearer"}'),
    }


VERSION = "?api-version=2024-07-01"
GCP_MACHINE = "https://compute.googleapis.com/compute/v1/projects/42/zones/europe-west4-a/instances/box"
AZURE_MACHINE = f"https://management.azure.com{MACHINE}"
RUNPOD, VAST = "https://api.runpod.io/v2/pods/pod7", "https://console.vast.ai/api/v0/instances/77/"
LAMBDA = "https://cloud.lambda.ai/api/v1/instance-operations/terminate"
# Of method and address: the key, the body (None: there need be none) and the status of the answer
APIS = {
    ("DELETE", GCP_MACHINE): ("secret-gcp", None, 200),
    ("POST", f"{GCP_MACHINE}/stop"): ("secret-gcp", "", 200),
    ("DELETE", AZURE_MACHINE + VERSION): ("secret-azure", None, 202),
    ("POST", f"{AZURE_MACHINE}/deallocate{VERSION}"): ("secret-azure", "", 202),
    ("DELETE", RUNPOD): ("secret-runpod", None, 204),
    ("POST", f"{RUNPOD}/action"): ("secret-runpod", {"action": "stop"}, 200),
    ("DELETE", VAST): ("secret-vast", {}, 200),
    ("PUT", VAST): ("secret-vast", {"state": "stopped"}, 200),
    ("POST", LAMBDA): ("secret-lambda", {"instance_ids": ["l-9"]}, 200),
}


class Service(BaseHTTPRequestHandler):
    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        address = f"{self.server.scheme}://{self.headers['Host']}{self.path}"
        state = (folder / "state").read_text()
        if state == "silent":
            return time.sleep(60)
        status, text = self.find(address, body, state)
        with lock, open(folder / "requests", "a") as log:
            log.write(f"{status} {self.command} {address} {body}".rstrip() + "\n")
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if status != 204:
            self.wfile.write(text.encode())

    do_GET = do_POST = do_PUT = do_DELETE = answer

    def find(self, address, body, state):
        """Status and text of the answer."""
        if state == "absent":
            return 404, "not found"
        if state == "garbage":  # as a network's login page would
            return 200, "<html>FALSE? TRUE! action, Preempt, TERMINATE_ON_HOST_MAINTENANCE: please sign in</html>"
        if (self.command, address) == ("PUT", f"{AWS}/api/token"):
            return (200, "secret-imds") if "X-aws-ec2-metadata-token-ttl-seconds" in self.headers else (400, "")
        if (self.command, address) in APIS:
            key, wanted, status = APIS[self.command, address]
            if self.headers["Authorization"] != f"Bearer {key}":
                return 401, ""
            if wanted is not None and (json.loads(body) if body else "") != wanted:
                return 400, ""
            if wanted is not None and self.headers["Content-Type"] != "application/json":
                return 415, ""
            with lock:
                if state == "busy" and address not in refused:
                    refused.add(address)
                    return 503, ""
            return status, "{}"
        if self.command != "GET" or address not in metadata(False):
            return 405, ""
        needed, text = metadata(state == "notice")[address]
        if any(self.headers[name] != value for name, value in needed.items()):
            return 401, ""
        return (404, "") if text is None else (200, text)

    def log_message(self, *arguments):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    scheme = "http"

    def handle_error(self, request, address):  # a client that has gone
        pass


http, https = Server(("127.0.0.1", 0), Service), Server(("127.0.0.1", 0), Service)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(folder / "certificate", folder / "key")
https.socket, https.scheme = context.wrap_socket(https.socket, server_side=True), "https"
for server in (http, https):
    threading.Thread(target=server.serve_forever, daemon=True).start()
(folder / "ports.partial").write_text(f"{http.server_port} {https.server_port}\n")
(folder / "ports.partial").rename(folder / "ports")
sys.stdin.read()
