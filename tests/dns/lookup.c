/* Looks names up with the resolver of the C library that it is built with: each
 * line of standard input is a name, and brings one line of JSON. */
#include <netdb.h>
#include <stdio.h>
#include <string.h>

static void print(const char *error, const struct addrinfo *all)
{
	char text[64];

	printf("{\"error\":\"%s\",\"addresses\":[", error);
	for (const struct addrinfo *it = all; it; it = it->ai_next) {
		if (getnameinfo(it->ai_addr, it->ai_addrlen, text, sizeof text, NULL, 0,
				NI_NUMERICHOST))
			strcpy(text, "?");
		printf("%s\"%s\"", it == all ? "" : ",", text);
	}
	puts("]}");
	fflush(stdout);
}

int main(void)
{
	char name[256];

	while (fgets(name, sizeof name, stdin)) {
		/* One answer an address, instead of one for each type of socket. */
		struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *all = NULL;
		int error;

		name[strcspn(name, "\n")] = '\0';
		error = getaddrinfo(name, NULL, &hints, &all);
		print(error ? gai_strerror(error) : "", all);
		if (!error)
			freeaddrinfo(all);
	}
	return 0;
}
