"""Takes the name servers from libp2p's resolvers; imported before libp2p is.

It makes them of dnspython's, one as soon as it is imported, and where /etc/resolv.conf has no name server they raise.
None is ever asked: the system resolves names (`node.p2p.host`), and addresses need no server.
"""

from __future__ import annotations

from multiaddr.resolvers import DNSResolver

DNSResolver.__init__ = object.__init__
