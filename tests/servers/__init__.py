"""Real object stores for tests: programs that `make test-servers` installs, each started once a session, on loopback.

What they do, as seen (versitygw 1.x over a directory, Azurite 3.37):

====================================  ==================  ==========================
                                      versitygw (S3)      Azurite (Azure)
====================================  ==================  ==========================
``If-None-Match: *`` on PUT           412, keeps          409, keeps
listing                               sorted by name      sorted by name
``start-after`` / a marker            yes                 the client leaves names out
ranges past the end                   416                 416
unfinished multi-part uploads         not listed          not listed
====================================  ==================  ==========================

fake-gcs-server is not among them: it has no uploads by the XML interface, through which `obstore` writes.
"""
